"""The contract of a backend, and the part that all backends share."""

from __future__ import annotations

import abc
import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from polyfed.backends.client_store import ClientStore
from polyfed.core.data_types import ClientData
from polyfed.core.rounds import TRAINING, Payload, Reply, Request, Transaction
from polyfed.core.seeds import chooser
from polyfed.core.server import ClientInfo, canonical_order
from polyfed.core.workbench import ClientState, Workbench, client_digest

log = logging.getLogger("polyfed")


class Usage(NamedTuple):
    """CPU seconds of the worker processes, and the memory in bytes that training added to them (the sum of their peaks)."""

    cpu_seconds: float = 0.0
    memory: int = 0


class Backend(Transaction, Protocol):
    """Sends requests to the clients of a run. The rest of polyfed uses only these members.

    A backend is also the ``Transaction`` of a round: ``commit`` makes the new client states permanent, ``rollback`` discards them.

    Attributes:
        remote: Clients store their state elsewhere; the backend stores only a version and a hash.
        leaves_newcomer: Clients cannot be reached after the run, so the run must save the newcomer model in its folder.
        data: Client data by client id, or placeholders with the sizes.
        changed: Clients whose state has changed since the last checkpoint. The recorder empties it.
        losses_of_round: Training loss per client in the last committed round.
        validations_of_round: Validation score per client of the models trained in that round, if this score selects the round.
        workers_usage: Usage of worker processes so far; None if clients train on other machines, so that it is unknown.
    """

    remote: bool
    leaves_newcomer: bool
    data: Mapping[str, ClientData]
    changed: set[str]
    losses_of_round: Mapping[str, float]
    validations_of_round: Mapping[str, float]

    @property
    def workers_usage(self) -> Usage | None: ...

    @property
    def infos(self) -> Sequence[ClientInfo]:
        """Information about each client that is available to the server, in canonical order."""

    def replace_data(self, clients: Collection[ClientData]) -> None:
        """Replace the client data. Client ids and states are unchanged."""

    @property
    def client_states(self) -> MutableMapping[str, ClientState]:
        """Client states after the last committed round. Set them to restore an earlier round."""

    @client_states.setter
    def client_states(self, states: Mapping[str, ClientState]) -> None: ...

    def __call__(self, request: Request) -> Iterator[Reply]:
        """Send a request and yield the replies lazily, in canonical order. Clients that fail are skipped with a warning."""

    def state_of(self, client: str) -> ClientState:
        """Return the state of a client after the last committed round.

        Raises:
            DataError: If the state is not available on this machine.
        """

    def can_read(self, client: str) -> bool:
        """Return True if the state of this client is available on this machine."""

    def retain(self, name: str, states: Mapping[str, ClientState] | None = None) -> None:
        """Keep ``states`` (default: the current ones) available until two more sets are retained under this name."""

    def keep_in(self, folder: Path) -> None:
        """Set the run folder, for backends that write client states to files."""

    def client_digests(self) -> dict[str, str]:
        """Return a hash of each client state."""

    def close(self) -> None:
        """Release processes, memory and connections. The next request acquires them again."""


@dataclass(frozen=True)
class Outcome:
    """Result of a request at one client.

    Attributes:
        client: Client id.
        payload: Reply, or None if the client failed.
        state: Client state after the request.
        loss: Training loss.
        problem: Reason for the failure.
        validation: Score of the trained model by the run's metric, if this score selects the round.
    """

    client: str
    payload: Payload | None
    state: ClientState
    loss: float | None = None
    problem: str = ""
    validation: float | None = None


class StagingBackend(abc.ABC):
    """Stages client states during a round and commits them after it. A subclass implements ``outcomes``."""

    remote = False
    leaves_newcomer = False

    @property
    def workers_usage(self) -> Usage | None:
        return None if self.remote else Usage()

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

    def share_states(self, other: StagingBackend) -> None:
        """Use the client states of another backend instead of separate ones."""
        self._client_states, self.staged = other._client_states, other.staged

    def __call__(self, request: Request) -> Iterator[Reply]:
        requested = sorted((client for client in request.payloads if client in self.place), key=self.place.__getitem__)
        for outcome in self.outcomes(request, [client for client in requested if not self.drops_out(request, client)]):
            reply = self.accept(request, outcome)
            if reply is not None:
                yield reply

    @abc.abstractmethod
    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        """Send the request to these clients and yield the outcomes in their order."""

    def accept(self, request: Request, outcome: Outcome) -> Reply | None:
        """Stage the client state and return the reply; None if the client failed."""
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
        """Return True if the client is simulated to fail in this round."""
        rate = self.bench.settings.drop
        if rate == 0 or request.purpose != TRAINING or request.round == 0:
            return False
        drops = chooser(self.bench.settings.seed, "drop", request.round, request.attempt, client).random() < rate
        if drops:
            log.debug("Round %d: client %s drops out (simulated).", request.round, client)
        return drops

    def commit(self, without: Collection[str] = ()) -> None:
        self.changed |= self._client_states.take(self.staged, without)
        self.staged = self._client_states.sibling()
        self.losses_of_round, self.losses = self.losses, {}
        self.validations_of_round, self.validations = self.validations, {}

    def rollback(self) -> None:
        self.staged, self.losses, self.validations = self._client_states.sibling(), {}, {}

    def current_state(self, client: str) -> ClientState:
        """Return the staged state of a client, or else the committed one."""
        return self.staged.get(client) or self.client_states.get(client) or ClientState()

    def state_of(self, client: str) -> ClientState:
        return self.client_states.get(client) or ClientState()

    def can_read(self, client: str) -> bool:
        return True

    # States are in memory, so the members below have nothing to do.

    def retain(self, name: str, states: Mapping[str, ClientState] | None = None) -> None: ...  # noqa: B027

    def keep_in(self, folder: Path) -> None: ...  # noqa: B027

    def close(self) -> None: ...  # noqa: B027

    def client_digests(self) -> dict[str, str]:
        return {client: client_digest(state) for client, state in self.client_states.items()}
