"""What a backend is: it asks clients, returns their replies, and looks after the state they keep between rounds.

``Backend`` is the whole contract. ``StagingBackend`` is the half that all backends share: the fixed order, simulated drop-outs, staging
and committing. A backend of its own fills in ``outcomes``.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polyfed.backends.client_store import ClientStore
from polyfed.core.data_types import ClientData
from polyfed.core.rounds import TRAINING, Payload, Reply, Request, Transaction
from polyfed.core.seeds import chooser
from polyfed.core.server import ClientInfo, canonical_order
from polyfed.core.workbench import ClientState, Workbench, client_digest

log = logging.getLogger("polyfed")


class Backend(Transaction, Protocol):
    """Reaches the clients of a run. The rest of polyfed uses these members of a backend, and no others.

    It is also the ``Transaction`` of a round: ``commit`` makes final what clients keep, ``rollback`` forgets it.

    Attributes:
        remote: clients keep their state elsewhere; here are only marks of it (a version and its hash).
        leaves_newcomer: clients can be asked now and not later, so a run must leave the newcomer's model in its folder.
        data: the data of each client by its id, or placeholders with their sizes.
        changed: clients whose state changed since the last checkpoint; the recorder empties it.
        losses_of_round: the training loss of each client in the last committed round.
        validations_of_round: the validation score of what each client trained in that round, by the run's metric, if the run chooses by it.
    """

    remote: bool
    leaves_newcomer: bool
    data: Mapping[str, ClientData]
    changed: set[str]
    losses_of_round: Mapping[str, float]
    validations_of_round: Mapping[str, float]

    @property
    def infos(self) -> Sequence[ClientInfo]:
        """What the server knows of each client, in the fixed order."""

    def replace_data(self, clients: Collection[ClientData]) -> None:
        """Put other data in the place of the clients' own; who they are and what they keep stays."""

    @property
    def client_states(self) -> MutableMapping[str, ClientState]:
        """What clients keep between rounds, as of the last committed round; may be set to go back to an earlier one."""

    @client_states.setter
    def client_states(self, states: Mapping[str, ClientState]) -> None: ...

    def __call__(self, request: Request) -> Iterator[Reply]:
        """Request the clients; replies come lazily, in the fixed order. A client that fails is left out, with a warning."""

    def state_of(self, client: str) -> ClientState:
        """What a client keeps, as of the last committed round; an error where it cannot be read here."""

    def can_read(self, client: str) -> bool:
        """Whether what this client keeps can be read here."""

    def retain(self, name: str, states: Mapping[str, ClientState] | None = None) -> None:
        """What clients keep now (or kept in ``states``) may be asked for again, until two more are retained under this name."""

    def keep_in(self, folder: Path) -> None:
        """The folder of the run, for backends that write what clients keep to files."""

    def client_digests(self) -> dict[str, str]:
        """A hash of what each client keeps."""

    def close(self) -> None:
        """Give back processes, memory and connections; the next ask takes them again."""


@dataclass(frozen=True)
class Outcome:
    """What came of a question to one client: its answer, its state after it, its loss; without an answer, why it is left out.

    ``validation`` is the score of the model it trained, by the run's metric, where the run chooses its round by that.
    """

    client: str
    payload: Payload | None
    state: ClientState
    loss: float | None = None
    problem: str = ""
    validation: float | None = None


class StagingBackend(abc.ABC):
    """Stages what clients keep during a round, and commits it when the round has succeeded."""

    remote = False
    leaves_newcomer = False

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        self.bench = bench
        self.replace_data(clients)
        self.client_states = {}
        self.staged = self._client_states.sibling()
        self.changed: set[str] = set()
        self.losses: dict[str, float] = {}
        self.losses_of_round: Mapping[str, float] = {}
        self.validations: dict[str, float] = {}
        self.validations_of_round: Mapping[str, float] = {}

    def replace_data(self, clients: Collection[ClientData]) -> None:
        self.data: Mapping[str, ClientData] = {client.id: client for client in clients}
        self.infos: Sequence[ClientInfo] = canonical_order(map(ClientInfo.from_data, clients))
        self.place = {info.id: place for place, info in enumerate(self.infos)}

    @property
    def client_states(self) -> MutableMapping[str, ClientState]:
        return self._client_states

    @client_states.setter
    def client_states(self, states: Mapping[str, ClientState]) -> None:
        self._client_states = ClientStore(states)

    def __call__(self, request: Request) -> Iterator[Reply]:
        asked = sorted((client for client in request.payloads if client in self.place), key=self.place.__getitem__)
        for outcome in self.outcomes(request, [client for client in asked if not self.drops_out(request, client)]):
            reply = self.taken(request, outcome)
            if reply is not None:
                yield reply

    @abc.abstractmethod
    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        """What comes of the question at each of these clients, in their order."""

    def taken(self, request: Request, outcome: Outcome) -> Reply | None:
        """Stage what the client keeps, and pass its answer on; None for a client that is left out."""
        name, state = outcome.client, outcome.state
        if outcome.payload is None:
            log.warning("Round %d: client %s is dropped: %s", request.round, name, outcome.problem)
            return None
        if request.purpose == TRAINING and (state.entries or state.memory or name in self.staged or name in self.client_states):
            self.staged[name] = state
        if outcome.loss is not None:
            self.losses[name] = outcome.loss
        if outcome.validation is not None:
            self.validations[name] = outcome.validation
        return Reply(name, outcome.payload, self.infos[self.place[name]].samples)

    def drops_out(self, request: Request, client: str) -> bool:
        """Whether this client is simulated to fail in this round."""
        rate = self.bench.settings.drop
        if rate == 0 or request.purpose != TRAINING or request.round == 0:
            return False
        lost = chooser(self.bench.settings.seed, "drop", request.round, request.attempt, client).random() < rate
        if lost:
            log.debug("Round %d: client %s drops out (simulated).", request.round, client)
        return lost

    def commit(self, without: Collection[str] = ()) -> None:
        """Make what the clients kept in this round final, except for those whose reply was rejected."""
        self.changed |= self._client_states.take(self.staged, without)
        self.staged = self._client_states.sibling()
        self.losses_of_round, self.losses = self.losses, {}
        self.validations_of_round, self.validations = self.validations, {}

    def rollback(self) -> None:
        self.staged, self.losses, self.validations = self._client_states.sibling(), {}, {}

    def current_state(self, client: str) -> ClientState:
        """What a client keeps now: from this round where it was asked before, else from the rounds before."""
        return self.staged.get(client) or self.client_states.get(client) or ClientState()

    def state_of(self, client: str) -> ClientState:
        return self.client_states.get(client) or ClientState()

    def can_read(self, client: str) -> bool:
        return True

    def retain(self, name: str, states: Mapping[str, ClientState] | None = None) -> None:  # noqa: B027 - an option, not a duty
        """Nothing to do: states are in memory, and whoever needs one has it."""

    def keep_in(self, folder: Path) -> None:  # noqa: B027 - likewise
        """Nothing to do: states are in memory."""

    def client_digests(self) -> dict[str, str]:
        return {client: client_digest(state) for client, state in self.client_states.items()}

    def close(self) -> None:  # noqa: B027 - likewise
        """Nothing to release."""
