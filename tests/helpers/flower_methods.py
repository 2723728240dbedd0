"""Methods for tests over Flower; loaded as a file of one's own, hence sent to the nodes with the app folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed import Array, Client, Facts, Method, Number, Part, Payload, Request, Server, register
from polyfed.core.rounds import Exchange, exchange, standard_round


def measure(client: Client, payload: Payload) -> Payload:
    """Counts what it is asked, over exchanges and rounds, and answers with numbers and a tensor."""
    client.receive(payload.entries)
    client.memory["asked"] = client.memory.get("asked", 0) + payload.extras["step"]
    weight = client.model.state_dict()
    first: Tensor = next(iter(weight.values())).detach().double()
    return Payload(extras={"asked": client.memory["asked"], "mean": first.mean()})


@exchange(uses=standard_round.uses)
def three_exchanges(server: Server) -> Exchange[None]:
    """Two questions that build on each other, then training."""
    told: dict[str, Any] = server.persistent("told", dict)
    for step in (1, 2):
        chosen = server.sample_clients()
        payloads = {client: Payload(server.outgoing(client), {"step": step}) for client in chosen}
        replies = yield Request("measure", payloads, round=server.round, attempt=server.attempt)
        for reply in replies:
            told[f"{server.round} {step} {reply.client}"] = [reply.extras["asked"], reply.extras["mean"]]
    yield from standard_round(server)


@register
def talkative() -> Method:
    """Three exchanges a round, with memory at the clients that lasts from one to the next."""
    return Method(
        "talkative",
        round=three_exchanges,
        answers={"measure": measure},
        reply_extras={"measure": {"asked": Number(0, 1e6, whole=True), "mean": Array((), torch.float64)}},
        facts=Facts(client_state=True, data_derived_uploads="means of weights", granularity="aggregate"),
    )


@dataclass(frozen=True)
class Nap(Part):
    """Sleeps while the file is not there, after having made it: the first time a client comes by, and never again."""

    client: str
    round: int
    file: str
    seconds: float

    def __call__(self, client: Client) -> None:
        if client.id == self.client and client.round == self.round and self.file and not Path(self.file).exists():
            Path(self.file).touch()
            time.sleep(self.seconds)


@register
def napping(client: str = "", round: int = 2, file: str = "", seconds: float = 600.0) -> Method:
    """One client falls asleep in one round, so that its node can be killed in the middle of it."""
    return Method("napping", before_training=(Nap(client, round, file, seconds),))


@dataclass(frozen=True)
class Fault(Part):
    """What one client sends in one round is not what it should be."""

    client: str
    round: int
    what: str

    def __call__(self, client: Client, entries: dict[str, Tensor]) -> dict[str, Tensor]:
        if client.id != self.client or client.round != self.round or not self.what:
            return entries
        first = next(iter(entries))
        wrong = {
            "nan": {first: torch.full_like(entries[first], torch.nan)},
            "large": {first: torch.full_like(entries[first], 1e6)},
            "shape": {first: torch.zeros(2, 2)},
            "extra": {"surprise": torch.zeros(2)},
            "huge": {"surprise": torch.zeros(96 * 1024 * 1024, dtype=torch.uint8)},
        }
        if self.what == "failure":
            raise ValueError("disk on fire")
        return entries | wrong[self.what]


@register
def faulty(client: str = "", round: int = 2, what: str = "") -> Method:
    """One client sends something wrong in one round."""
    return Method("faulty", uploads=(Fault(client, round, what),))
