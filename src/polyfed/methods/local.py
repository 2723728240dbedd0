"""Local (SingleSet, Standalone): every client trains by itself.

Nothing is sent or uploaded; model and optimizer state stay at the client, so it is one uninterrupted training of T * E epochs from the
common initial weights. Lower reference for collaboration.

Reference: SingleSet in Li et al. (FedBN), ICLR 2021; Local in hFedF.

Differences: the budget is T * E epochs (FedBN's program trains a fixed number). A newcomer has no model of its own: each client's model is
scored on the unseen domain and the scores are averaged (hFedF).
"""

from __future__ import annotations

from polyfed.core.conversation import Talk, conversation
from polyfed.core.evaluation import Newcomer, client_states
from polyfed.core.method import Facts, Method, register
from polyfed.core.server import Server
from polyfed.core.sharing import Rule, everything, keep_local, momentum_buffers


@conversation(uses=("inputs", "before_training", "after_training", "objective", "task_loss", "gradients"))
def train_alone(server: Server) -> Talk[None]:
    """Let clients train; nothing comes back."""
    yield server.ask("train", server.sample())


def every_model(server: Server) -> Talk[Newcomer]:
    """Each client's model; their scores are averaged."""
    states = yield from client_states(server)
    return Newcomer([(1 / len(states), state) for state in states.values()], score="mean_of_models")


@register
def local() -> Method:
    """Train every client by itself."""
    rules = (keep_local(everything), Rule(momentum_buffers, keep=True, optional=True))
    return Method("local", sharing=rules, round=train_alone, newcomer=every_model, facts=Facts(client_state=True, messages="0"))
