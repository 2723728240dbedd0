"""Run the setup and the rounds of a federation, independently of the method.

An exchange is a generator that yields a ``Request`` and receives the replies. The same code handles one message per run, per round or per
layer. Backends differ only in how they send requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

from polyfed.core.part import DeclaredFunction, declare
from polyfed.core.slots import USED_BY_THE_STANDARD_ROUND
from polyfed.errors import ALL_CLIENTS, NotFinite, TooFewReplies

if TYPE_CHECKING:
    from torch import Tensor

    from polyfed.core.method import Method
    from polyfed.core.server import Server


log = logging.getLogger("polyfed")
TRAINING, EVALUATION, NEWCOMER = "training", "evaluation", "newcomer"


@dataclass(frozen=True)
class Payload:
    """Content of a message.

    Attributes:
        entries: State entries.
        extras: Other values: numbers, text, tensors, and lists and dicts of them.
    """

    entries: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """Request to some clients, with one payload per client.

    Attributes:
        what: Name of the request, such as "train".
        payloads: Payload of each client.
        purpose: Training, evaluation or newcomer. Traffic is counted separately for each.
        round: Current round.
        attempt: Attempt within the round, starting at 0.
        together: True if all clients have the same model, so that a backend may compute several replies at once.
    """

    what: str
    payloads: Mapping[str, Payload]
    purpose: str = TRAINING
    round: int = 0
    attempt: int = 0
    together: bool = False


@dataclass(frozen=True)
class Reply:
    """Reply of one client.

    Attributes:
        client: Client name.
        payload: Uploaded entries and extras.
        samples: Number of training samples of the client.
        decoded: Entries with the method's ``uploads`` inverted. Set once the core has checked the reply.
    """

    client: str
    payload: Payload
    samples: int
    decoded: Mapping[str, Tensor] | None = None

    @property
    def entries(self) -> Mapping[str, Tensor]:
        """Uploaded state entries."""
        return self.payload.entries

    @property
    def extras(self) -> Mapping[str, Any]:
        """Uploaded extras."""
        return self.payload.extras


T = TypeVar("T")
Replies: TypeAlias = Iterator[Reply]
Exchange: TypeAlias = Generator[Request, Replies, T]
SendRequest: TypeAlias = Callable[[Request], Replies]
P = ParamSpec("P")
Observer: TypeAlias = "Callable[[Server], None]"


def exchange(uses: Collection[str] = ()) -> Callable[[Callable[P, T]], DeclaredFunction[P, T]]:
    """Declare the slots that a custom round uses. Combining it with a part that fills another slot is then an error."""
    return declare(uses=frozenset(uses))


def run_exchange(requests: Exchange[T], send_request: SendRequest) -> T:
    """Send each request to the clients and pass their replies back, until the exchange ends. Return its result.

    Replies are lazy. Those that the exchange did not read are received before the next request is sent.
    """
    replies: Replies | None = None
    while True:
        try:
            request = requests.send(replies)  # type: ignore[arg-type]
        except StopIteration as end:
            _drain(replies)
            return end.value  # type: ignore[no-any-return]
        _drain(replies)
        replies = iter(send_request(request))


def _drain(replies: Replies | None) -> None:
    for _ in replies or ():
        pass


@exchange(uses=USED_BY_THE_STANDARD_ROUND)
def standard_round(server: Server) -> Exchange[None]:
    """Sample clients, send them the planned entries, and aggregate their replies after training."""
    replies = yield server.request("train", server.sample_clients())
    server.aggregate(replies)


class Transaction(Protocol):
    """Client state that was staged during a round."""

    def commit(self, without: Collection[str] = ()) -> None:
        """Make the staged state permanent, except for the clients in ``without``."""

    def rollback(self) -> None:
        """Discard the staged state."""


def run_rounds(
    method: Method,
    server: Server,
    client_states: Transaction,
    send_request: SendRequest,
    rounds: int,
    observers: Iterable[Observer] = (),
) -> None:
    """Run the setup, if it has not run yet, and all remaining rounds.

    Args:
        method: Method to run.
        server: Server state. ``server.round`` is the last completed round; 0 runs the setup first.
        client_states: Staged client state, usually the backend.
        send_request: Sends a request and yields the replies. Usually the backend, or a wrapper that counts traffic.
        rounds: Number of the last round.
        observers: Callables that receive the server after the setup and after every round.
    """
    observers = tuple(observers)
    if server.round == 0:
        for setup in method.setup:
            run_exchange(setup(server), send_request)
        client_states.commit()
        for observer in observers:
            observer(server)
    for round_number in range(server.round + 1, rounds + 1):
        run_round(method, server, client_states, send_request, round_number)
        for observer in observers:
            observer(server)


def run_round(method: Method, server: Server, client_states: Transaction, send_request: SendRequest, round_number: int) -> None:
    """Run one round, and retry it from the same state if too few clients reply.

    Raises:
        TooFewReplies: If every attempt fails.
        NotFinite: If all clients diverged.
    """
    start_exchange = method.round or standard_round
    snapshot = server.snapshot_memory()
    for attempt in range(server.settings.retries + 1):
        server.start_round(round_number, attempt)
        try:
            run_exchange(start_exchange(server), send_request)
        except TooFewReplies as error:
            client_states.rollback()
            server.restore_memory(snapshot)
            kept = f"The state after round {round_number - 1} is kept."
            if all_clients_diverged(server):
                server.round = round_number - 1
                raise NotFinite(
                    f"the weights of all {server.num_requested} clients are NaN or infinite. Lower the learning rate (try --lr "
                    f"{server.settings.lower_lr:g}). {kept}",
                    ALL_CLIENTS,
                    round_number,
                ) from error
            if attempt == server.settings.retries:
                server.round = round_number - 1
                raise TooFewReplies(f"{error} Gave up after {attempt + 1} attempts. {kept}") from error
            log.warning("%s Retrying the round.", error)
        else:
            client_states.commit(without=server.rejected)
            return


def all_clients_diverged(server: Server) -> bool:
    """Return True if every requested client sent NaN or infinite values, so that retrying cannot help."""
    return len(server.rejected) == server.num_requested > 1 and all("not finite" in reason for reason in server.rejected.values())
