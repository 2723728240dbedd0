"""An experiment by which FixBN takes batch norm apart. It asks why batch norm suffers; it is not meant as a method.

``fixbn(freeze_at=1.0, stage_one="decoupled")`` (section 3.3) averages the statistics of a round first and trains the weights with that average.
The other experiment (section 3.4) is ``polyfed.analysis.union_statistics``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polyfed.core.batch_norm import estimate_statistics
from polyfed.core.client import Client
from polyfed.core.conversation import Payload, Replies, Talk, standard_round
from polyfed.core.extras import Asked
from polyfed.core.reducers import Reduction
from polyfed.core.server import Server
from polyfed.core.sharing import Rule, bn_statistics
from polyfed.errors import TooFewReplies

STATISTICS_QUESTION = "batch_norm_statistics"


def last_round(at: int | float, rounds: int) -> int:
    """The last round before something starts that was given as a round or as a share of all rounds."""
    return Rule(bn_statistics, since=at).starts_after(rounds)


def measure_statistics(client: Client, payload: Payload) -> Payload:
    """This round's batches through the received model, with its weights as they are; gives the statistics they leave."""
    client.receive(payload.entries)
    estimate_statistics(client.model, (x for x, _ in client.batches()), "moving")
    names = [name for name in client.phase.up if bn_statistics.matches(client.bench.plan.entries[name])]
    return Payload({name: client.bench.live[name].detach().clone() for name in names})


def uploaded_statistics(asked: Asked) -> list[str]:
    """The statistics that the plan says are uploaded."""
    return [name for name in asked.plan.at(asked.ask.round).up if bn_statistics.matches(asked.plan.entries[name])]


def averaged_statistics(server: Server, replies: Replies) -> dict[str, Tensor]:
    """Reduce the clients' statistics as the plan says."""
    known = server.plan.entries
    names = [name for name in server.phase.up if bn_statistics.matches(known[name])]
    groups = {reducer: [name for name in group if name in names] for reducer, group in server.phase.groups.items()}
    reduction = Reduction(groups, server.state)
    for reply in replies:
        reduction.add(reply.entries, server.weight(reply))
    return server.in_planned_types(reduction.finish())


@dataclass(frozen=True)
class Decoupled:
    """Until round T*: ask for statistics, average them, then let clients train with the average. After it: the usual round."""

    at: int | float
    uses = frozenset(getattr(standard_round, "uses", ()))

    def __call__(self, server: Server) -> Talk[None]:
        before = server.state
        if server.round <= last_round(self.at, server.rounds):
            replies = yield server.ask(STATISTICS_QUESTION, server.sample())
            server.state = before | averaged_statistics(server, replies)
        try:
            yield from standard_round(server)
        except TooFewReplies:
            # The round is repeated, and must start from the state it started from.
            server.state = before
            raise
