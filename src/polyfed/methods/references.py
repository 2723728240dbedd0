"""Local and central training, the lower and upper reference. Differences from the paper: docs/methods, one page per method."""

from __future__ import annotations

from polyfed.core.data_types import Federation
from polyfed.core.evaluation import Newcomer, client_states
from polyfed.core.method import Facts, Method, register
from polyfed.core.rounds import Exchange, exchange
from polyfed.core.server import Server
from polyfed.core.sharing import Rule, everything, keep_local, momentum_buffers


@exchange(uses=("inputs", "before_training", "after_training", "objective", "task_loss", "gradients"))
def train_alone(server: Server) -> Exchange[None]:
    yield server.request("train", server.sample_clients())


def client_models(server: Server) -> Exchange[Newcomer]:
    """Return each client's model; their scores are averaged."""
    states = yield from client_states(server)
    return Newcomer([(1 / len(states), state) for state in states.values()], score="mean_of_models")


@register
def local() -> Method:
    """Train every client separately.

        w_k <- SGD on D_k, T * E epochs without interruption, from the common initial weights

    Reference:
        SingleSet in X. Li et al. FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021. Local
        in M. Bartholet et al. Non-linear Fusion in Federated Learning: A Hypernetwork Approach to Federated Domain
        Generalization. 2024.
    """
    rules = (keep_local(everything), Rule(momentum_buffers, keep=True, optional=True))
    return Method("local", sharing=rules, round=train_alone, newcomer=client_models, facts=Facts(client_state=True, messages="0"))


def _pool(federation: Federation) -> Federation:
    return federation.pooled()


@register
def central() -> Method:
    """Train one model on the pooled data of all clients.

        w <- SGD on D_1 + ... + D_N, shuffled together, T * E epochs without interruption

    Reference:
        M. Bartholet et al. Non-linear Fusion in Federated Learning: A Hypernetwork Approach to Federated Domain Generalization.
        2024 (hFedF; "Central").
        J. Zhong, H.-Y. Chen and W.-L. Chao. Making Batch Normalization Great in Federated Deep Learning. 2023 (FixBN;
        "Centralised").
    """
    return Method(
        "central",
        population=_pool,
        sharing=(Rule(momentum_buffers, keep=True, optional=True),),
        facts=Facts(data_derived_uploads="all training data, pooled in one place", granularity="per sample"),
    )
