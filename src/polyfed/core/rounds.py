"""Rounds: what is asked of clients, and the loop that holds every exchange a method asks for. It knows nothing about any method.

A exchange is a generator that yields an Request and is given the replies; the loop only passes them on. One message per run, per round
or per layer is the same code. How clients are asked is what differs between backends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

from polyfed.core.part import DeclaredFunction, declare
from polyfed.core.slots import USED_BY_THE_STANDARD_ROUND
from polyfed.errors import TooFewReplies

if TYPE_CHECKING:
    from torch import Tensor

    from polyfed.core.method import Method
    from polyfed.core.server import Server


TRAINING, EVALUATION, NEWCOMER = "training", "evaluation", "newcomer"


@dataclass(frozen=True)
class Payload:
    """The content of a message: ``entries`` of the state, and ``extras``: anything else (numbers, text, tensors, lists and dicts of them)."""

    entries: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A question to some clients, with a payload for each. ``purpose`` keeps the costs of training, evaluation and newcomers apart.

    ``together``: the clients have the same model, so that a backend that holds their data may work out several answers at once.
    """

    what: str
    payloads: Mapping[str, Payload]
    purpose: str = TRAINING
    round: int = 0
    attempt: int = 0
    together: bool = False


@dataclass(frozen=True)
class Reply:
    """One client's answer. ``decoded`` holds its entries once the core has checked them, with the method's ``uploads`` undone."""

    client: str
    payload: Payload
    samples: int
    decoded: Mapping[str, Tensor] | None = None

    @property
    def entries(self) -> Mapping[str, Tensor]:
        """The entries of the state that came up."""
        return self.payload.entries

    @property
    def extras(self) -> Mapping[str, Any]:
        """Everything else that came up."""
        return self.payload.extras


T = TypeVar("T")
Replies: TypeAlias = Iterator[Reply]
Exchange: TypeAlias = Generator[Request, Replies, T]
SendRequest: TypeAlias = Callable[[Request], Replies]

P = ParamSpec("P")


def exchange(uses: Collection[str] = ()) -> Callable[[Callable[P, T]], DeclaredFunction[P, T]]:
    """Mark a round of one's own with the slots it uses; a part that fills another slot is then an error, not ignored."""
    return declare(uses=frozenset(uses))


def run_exchange(talk: Exchange[T], send_request: SendRequest) -> T:
    """Put each question to the clients and hand back their replies, until the exchange ends.

    Replies are lazy; those the exchange did not look at are still taken in before the next question.
    """
    replies: Replies | None = None
    while True:
        try:
            ask = talk.send(replies)  # type: ignore[arg-type]
        except StopIteration as end:
            _drain(replies)
            return end.value  # type: ignore[no-any-return]
        _drain(replies)
        replies = iter(send_request(ask))


def _drain(replies: Replies | None) -> None:
    for _ in replies or ():
        pass


@exchange(uses=USED_BY_THE_STANDARD_ROUND)
def standard_round(server: Server) -> Exchange[None]:
    """Sample clients, send them what the plan says, let them train, absorb what comes back."""
    replies = yield server.request("train", server.sample_clients())
    server.aggregate(replies)


log = logging.getLogger("polyfed")

Observer: TypeAlias = "Callable[[Server], None]"


class Transaction(Protocol):
    """What clients keep in a round: final when the round has succeeded, forgotten when it has not."""

    def commit(self, without: Collection[str] = ()) -> None:
        """Make it final, except for some clients."""

    def rollback(self) -> None:
        """Forget it."""


def run_rounds(
    method: Method,
    server: Server,
    client_states: Transaction,
    send_request: SendRequest,
    rounds: int,
    observers: Iterable[Observer] = (),
) -> None:
    """Hold the setup and the rounds that are still to come.

    Args:
        method: whose exchanges are held.
        server: the state; ``server.round`` says how far it is.
        client_states: what clients keep; usually the backend.
        send_request: the backend, or a wrapper of it that counts what travels.
        rounds: the last round.
        observers: called after every round, and once after the setup.
    """
    watching = tuple(observers)
    if server.round == 0:
        for setup in method.setup:
            run_exchange(setup(server), send_request)
        client_states.commit()
        for observer in watching:
            observer(server)
    for number in range(server.round + 1, rounds + 1):
        run_round(method, server, client_states, send_request, number)
        for observer in watching:
            observer(server)


def run_round(method: Method, server: Server, client_states: Transaction, send_request: SendRequest, number: int) -> None:
    """Hold one round; repeat it from the same state when too few clients answered."""
    talk = method.round or standard_round
    before = server.snapshot_memory()
    for attempt in range(server.settings.retries + 1):
        server.start_round(number, attempt)
        try:
            run_exchange(talk(server), send_request)
        except TooFewReplies as error:
            client_states.rollback()
            server.restore_memory(before)
            if diverged(server):
                server.round = number - 1
                raise TooFewReplies(
                    f"Training diverged in round {number}: the weights of all {server.num_requested} clients became NaN or infinite. Lower the "
                    f"learning rate (--lr is {server.settings.lr:g}); everything up to round {number - 1} is kept."
                ) from error
            if attempt == server.settings.retries:
                server.round = number - 1
                raise TooFewReplies(
                    f"{error} The round was tried {attempt + 1} times; everything up to round {number - 1} is kept."
                ) from error
            log.warning("%s The round is repeated.", error)
        else:
            client_states.commit(without=server.rejected)
            return


def diverged(server: Server) -> bool:
    """Whether every client that was asked answered with values that are not finite; to repeat the round would not help."""
    return len(server.rejected) == server.num_requested > 1 and all("not finite" in why for why in server.rejected.values())
