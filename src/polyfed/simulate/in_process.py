"""Deliver in this process: clients are swapped into one resident model, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.checkpoint import client_digest
from polyfed.client import Client, Kept, Workbench, answer
from polyfed.conversation import TRAINING, Ask, Payload, Reply
from polyfed.data.federation import ClientData
from polyfed.errors import NotFinite
from polyfed.seeds import chooser
from polyfed.server import ClientInfo, in_fixed_order
from polyfed.simulate.shelf import Shelf

log = logging.getLogger("polyfed")


@dataclass(frozen=True)
class Outcome:
    """What came of a question to one client: its answer, what it holds now, its loss; without an answer, why it is left out."""

    client: str
    payload: Payload | None
    kept: Kept
    loss: float | None = None
    problem: str = ""


class InProcess:
    """The default delivery. What clients keep is staged during a round and committed when it has succeeded.

    Other deliveries of one machine differ in ``outcomes`` only: who works out the answers, and how many at a time. ``remote`` says
    that clients keep their state elsewhere, and only its hash is known here; ``takes_groups``, that ``outcomes`` is the faster the
    more clients it is given at once; ``leaves_newcomer``, that clients can be asked now and not later, so that a run must leave the
    newcomer's model in its folder.
    """

    remote = False
    takes_groups = False
    leaves_newcomer = False

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        self.bench = bench
        self.data = {client.id: client for client in clients}
        self.infos = in_fixed_order(map(ClientInfo.of, clients))
        self.place = {info.id: place for place, info in enumerate(self.infos)}
        self.kept = {}
        self.staged = self._kept.beside()
        self.changed: set[str] = set()
        self.losses: dict[str, float] = {}
        self.losses_of_round: dict[str, float] = {}

    @property
    def kept(self) -> MutableMapping[str, Kept]:
        """What clients keep between rounds, by their ids."""
        return self._kept

    @kept.setter
    def kept(self, clients: Mapping[str, Kept]) -> None:
        self._kept = Shelf(clients)

    def __call__(self, ask: Ask) -> Iterator[Reply]:
        asked = sorted((client for client in ask.payloads if client in self.place), key=self.place.__getitem__)
        for outcome in self.outcomes(ask, [client for client in asked if not self.drops_out(ask, client)]):
            reply = self.taken(ask, outcome)
            if reply is not None:
                yield reply

    def outcomes(self, ask: Ask, clients: Sequence[str]) -> Iterator[Outcome]:
        """What comes of the question at each of these clients, in their order."""
        for client in clients:
            yield self.outcome(ask, client, self.held(client))

    def held(self, client: str) -> Kept:
        """What a client holds now: from this round where it was asked before, else from the rounds before."""
        return self.staged.get(client) or self.kept.get(client) or Kept()

    def outcome(self, ask: Ask, name: str, held: Kept) -> Outcome:
        """Let one client answer."""
        client = Client(self.data[name], self.bench, held, ask.round, ask.attempt)
        try:
            payload = answer(client, ask.what, ask.payloads[name])
        except NotFinite as error:
            if self.bench.settings.on_nan == "stop":
                raise
            return Outcome(name, None, held, problem=str(error))
        return Outcome(name, payload, client.kept, client.loss)

    def taken(self, ask: Ask, outcome: Outcome) -> Reply | None:
        """Stage what the client keeps, and pass its answer on; None for a client that is left out."""
        name, kept = outcome.client, outcome.kept
        if outcome.payload is None:
            log.warning("Round %d: client %s is dropped: %s", ask.round, name, outcome.problem)
            return None
        if ask.purpose == TRAINING and (kept.entries or kept.memory or name in self.staged or name in self.kept):
            self.staged[name] = kept
        if outcome.loss is not None:
            self.losses[name] = outcome.loss
        return Reply(name, outcome.payload, self.infos[self.place[name]].samples)

    def drops_out(self, ask: Ask, client: str) -> bool:
        """Whether this client is simulated to fail in this round."""
        rate = self.bench.settings.drop
        if rate == 0 or ask.purpose != TRAINING or ask.round == 0:
            return False
        lost = chooser(self.bench.settings.seed, "drop", ask.round, ask.attempt, client).random() < rate
        if lost:
            log.debug("Round %d: client %s drops out (simulated).", ask.round, client)
        return lost

    def commit(self, without: Mapping[str, str] | Collection[str] = ()) -> None:
        """Make what the clients kept in this round final, except for those whose reply was rejected."""
        self.changed |= self._kept.take(self.staged, without)
        self.staged = self._kept.beside()
        self.losses_of_round, self.losses = self.losses, {}

    def rollback(self) -> None:
        """Forget what the clients kept in this round."""
        self.staged, self.losses = self._kept.beside(), {}

    def holds(self, client: str) -> bool:
        """Whether what this client keeps can be looked at here."""
        return True

    def state_of(self, client: str) -> Kept:
        """What a client keeps, as of the last round that succeeded."""
        return self.kept.get(client) or Kept()

    def keep_in(self, folder: Path) -> None:
        """The folder of the run, for deliveries that write what clients keep to files."""

    def hold(self, name: str, state: Mapping[str, Kept] | None = None) -> None:
        """What clients keep now (or kept in ``state``) may be asked for again, until two more states are held under this name."""

    def client_digests(self) -> dict[str, str]:
        """A hash of what each client keeps."""
        return {client: client_digest(kept) for client, kept in self.kept.items()}

    def close(self) -> None:
        """Give back what the delivery holds beside memory; it may be used again."""
