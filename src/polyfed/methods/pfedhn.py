"""pFedHN: a hypernetwork on the server makes every client's model, and learns from one client after the other.

    theta_i = h(nu_i; phi)                            sent to client i, which trains and returns theta_i'
    (phi, nu_i) <- SGD step along J_i^T (theta_i - theta_i')      after each client

Reference: Shamsian et al., Personalized Federated Learning using Hypernetworks, ICML 2021.

Differences from the paper: it takes one random client at a time, without rounds; here a round is every sampled client once, in an order drawn
again each round. ``server_update="joint"`` takes one step along the mean of all gradients instead: hFedF without alignment and moving average.
The network is that of hFedF's comparison (its Table 8: width 50, LeakyReLU), not the authors' (width 100, ReLU). Clients' gradients are not clipped.
The variant with private heads is not here. Batch-norm statistics and counters stay at the client; affine parameters are generated.

Defaults: server_lr and server_weight_decay from hFedF's Table 10, PACS (Office-Home and VLCS 1e-3, 1e-4), which are also the authors' own;
SGD, momentum 0.9 and clip 50 from the authors' program; embedding_dim floor(1 + N/4).
"""

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
    """Clients one after the other; the hypernetwork takes a step after each."""

    def __call__(self, server: Server) -> Exchange[None]:
        maker = self.generation.generator(server)
        before = copy.deepcopy(maker.state_dict())
        clients = server.sample_clients()
        chooser(server.settings.seed, "order", server.round).shuffle(clients)
        taken: list[Reply] = []
        for client in clients:
            ask = server.request("train", [client])
            for reply in (yield ask):
                maker.learn({client: self.generation.deltas(server, ask, reply)}, align=False)
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
    """Make every client's model by a hypernetwork, learnt from one client after the other.

    Args:
        server_update: sequential: a step after each client; joint: one step a round along the mean of all gradients.
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
