"""pFedHN: personalised models from a hypernetwork. Differences from the paper: docs/methods/pfedhn.md."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from polyfed.core.method import Method, register
from polyfed.core.rounds import Exchange, Reply
from polyfed.core.seeds import chooser
from polyfed.core.server import Server
from polyfed.errors import TooFewReplies
from polyfed.methods._shared import require_choice
from polyfed.methods._shared.generated_weights import (
    HYPERNETWORK_OPTIONS,
    GeneratedRound,
    Generation,
    ServerOptimizer,
    generating_method,
)
from polyfed.methods.hfedf import JointRound

UPDATES = ("sequential", "joint")


@dataclass(frozen=True)
class SequentialRound(GeneratedRound):
    """Train one client after the other; the hypernetwork takes a step after each."""

    def __call__(self, server: Server) -> Exchange[None]:
        maker = self.generation.generator(server)
        before = copy.deepcopy(maker.state_dict())
        clients = server.sample_clients()
        chooser(server.settings.seed, "order", server.round).shuffle(clients)
        taken: list[Reply] = []
        for client in clients:
            request = server.request("train", [client])
            for reply in (yield request):
                maker.learn({client: self.generation.deltas(server, request, reply)}, align=False)
                taken.append(reply)
        server.num_requested = len(clients)
        try:
            server.aggregate(taken)
        except TooFewReplies:
            maker.load_state_dict(before)
            raise


@register(shared_options=HYPERNETWORK_OPTIONS)
def pfedhn(  # noqa: D417 (the other options: HYPERNETWORK_OPTIONS)
    server_update: str = "sequential",
    server_lr: float = 1e-2,
    server_weight_decay: float = 1e-3,
    embedding_dim: int = 0,
    embedding_scale: float = 1.0,
    generate: str = "all",
    head_init: str = "initial",
    width: int = 50,
    server_optimizer: str = "sgd",
    server_momentum: float = 0.9,
    server_eps: float = 1e-8,
    trunk_rate: float = 1.0,
    server_clip: float = 50.0,
    memory_share: float = 0.5,
) -> Method:
    """Generate every client's model with a hypernetwork that is trained on one client after the other.

        theta_i = h(nu_i; phi)                sent to client i, which returns theta_i'
        (phi, nu_i) <- step of the server optimizer along J_i^T (theta_i - theta_i')      after each client

    Args:
        server_update: sequential: a step after each client; joint: one step per round along the mean of all gradients.

    Reference:
        A. Shamsian et al. Personalized Federated Learning using Hypernetworks. ICML 2021.
    """
    require_choice("pfedhn", "server_update", server_update, UPDATES)
    sequential = server_update == "sequential"
    step = ServerOptimizer(
        "pfedhn", server_optimizer, server_lr, server_weight_decay, server_momentum, server_clip, server_eps, trunk_rate
    )
    copies = 1 + step.moments if sequential else 0
    generation = Generation(
        "pfedhn", step, generate, "learnt", embedding_dim, embedding_scale, head_init, width, memory_share, copies
    )
    if sequential:
        return generating_method(generation, SequentialRound(generation))
    return generating_method(generation, JointRound(generation, align=False, ema_alpha=None, warmup=1))
