"""Deliver in this process: clients are swapped into one resident model, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping

from polyfed.client import Client, Kept, Workbench, answer
from polyfed.conversation import TRAINING, Ask, Reply
from polyfed.data.federation import ClientData
from polyfed.errors import NotFinite
from polyfed.seeds import chooser
from polyfed.server import ClientInfo, in_fixed_order

log = logging.getLogger("polyfed")


class InProcess:
    """The default delivery. What clients keep is staged during a round and committed when it has succeeded."""

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        self.bench = bench
        self.data = {client.id: client for client in clients}
        self.kept: dict[str, Kept] = {}
        self.staged: dict[str, Kept] = {}
        self.changed: set[str] = set()
        self.losses: dict[str, float] = {}
        self.losses_of_round: dict[str, float] = {}

    @property
    def infos(self) -> list[ClientInfo]:
        """What the server may know of the clients."""
        return in_fixed_order(ClientInfo(c.id, c.domains, len(c.train)) for c in self.data.values())

    def __call__(self, ask: Ask) -> Iterator[Reply]:
        for info in self.infos:
            if info.id in ask.payloads and not self.drops_out(ask, info.id):
                reply = self.reply(ask, info)
                if reply is not None:
                    yield reply

    def reply(self, ask: Ask, info: ClientInfo) -> Reply | None:
        """One client's answer; None when its loss is not finite and such clients are dropped."""
        kept = self.staged.get(info.id) or self.kept.get(info.id) or Kept()
        client = Client(self.data[info.id], self.bench, kept, ask.round, ask.attempt)
        try:
            payload = answer(client, ask.what, ask.payloads[info.id])
        except NotFinite as error:
            if self.bench.settings.on_nan == "stop":
                raise
            log.warning("Round %d: client %s is dropped: %s", ask.round, info.id, error)
            return None
        if ask.purpose == TRAINING and (client.kept.entries or client.kept.memory or info.id in self.staged):
            self.staged[info.id] = client.kept
        if client.loss is not None:
            self.losses[info.id] = client.loss
        return Reply(info.id, payload, info.samples)

    def drops_out(self, ask: Ask, client: str) -> bool:
        """Whether this client is simulated to fail in this round."""
        rate = self.bench.settings.drop
        if rate == 0 or ask.purpose != TRAINING or ask.round == 0:
            return False
        lost = chooser(self.bench.settings.seed, "drop", ask.round, ask.attempt, client).random() < rate
        if lost:
            log.info("Round %d: client %s drops out (simulated).", ask.round, client)
        return lost

    def commit(self, without: Mapping[str, str] | Collection[str] = ()) -> None:
        """Make what the clients kept in this round final, except for those whose reply was rejected."""
        accepted = {client: kept for client, kept in self.staged.items() if client not in without}
        self.kept |= accepted
        self.changed |= set(accepted)
        self.staged = {}
        self.losses_of_round, self.losses = self.losses, {}

    def rollback(self) -> None:
        """Forget what the clients kept in this round."""
        self.staged, self.losses = {}, {}
