"""Local and central training: the lower and the upper reference, neither of them federated.

    local:     every client trains by itself (SingleSet, Standalone): nothing is sent or uploaded, model and optimizer state stay at the client
    central:   one model on the union of all clients' training data; optimizer state is kept

Both are one uninterrupted training of T * E epochs with the settings of FedAvg, local training from the common initial weights.

Reference: SingleSet in Li et al. (FedBN), ICLR 2021; Local and Central in hFedF; Centralised in FixBN.

Differences from the papers: the budget is T * E epochs (FedBN's program trains a fixed number). A newcomer has no local model: each client's model is scored on the
unseen domain and the scores are averaged (hFedF).
"""

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


def every_model(server: Server) -> Exchange[Newcomer]:
    """Each client's model; their scores are averaged."""
    states = yield from client_states(server)
    return Newcomer([(1 / len(states), state) for state in states.values()], score="mean_of_models")


@register
def local() -> Method:
    """Train every client by itself."""
    rules = (keep_local(everything), Rule(momentum_buffers, keep=True, optional=True))
    return Method("local", sharing=rules, round=train_alone, newcomer=every_model, facts=Facts(client_state=True, messages="0"))


def _pool(federation: Federation) -> Federation:
    return federation.pooled()


@register
def central() -> Method:
    """Train one model on everybody's data."""
    return Method(
        "central",
        population=_pool,
        sharing=(Rule(momentum_buffers, keep=True, optional=True),),
        facts=Facts(data_derived_uploads="all training data, pooled in one place", granularity="per sample"),
    )
