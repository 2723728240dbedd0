"""Conversations: a generator yields an Ask and is given the replies; the loop only passes them on.

One message per run, per round or per layer is the same code. How clients are asked is what differs between backends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from polyfed.core.part import DeclaredFunction, declare
from polyfed.core.slots import USED_BY_THE_STANDARD_ROUND

if TYPE_CHECKING:
    from torch import Tensor

    from polyfed.core.server import Server

TRAINING, EVALUATION, NEWCOMER = "training", "evaluation", "newcomer"


@dataclass(frozen=True)
class Payload:
    """The content of a message: ``entries`` of the state, and ``extras``: anything else (numbers, text, tensors, lists and dicts of them)."""

    entries: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
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
Talk: TypeAlias = Generator[Ask, Replies, T]
AskClients: TypeAlias = Callable[[Ask], Replies]

P = ParamSpec("P")


def conversation(uses: Collection[str] = ()) -> Callable[[Callable[P, T]], DeclaredFunction[P, T]]:
    """Mark a round of one's own with the slots it uses; a part that fills another slot is then an error, not ignored."""
    return declare(uses=frozenset(uses))


def converse(talk: Talk[T], ask_clients: AskClients) -> T:
    """Put each question to the clients and hand back their replies, until the conversation ends.

    Replies are lazy; those the conversation did not look at are still taken in before the next question.
    """
    replies: Replies | None = None
    while True:
        try:
            ask = talk.send(replies)  # type: ignore[arg-type]
        except StopIteration as end:
            _drain(replies)
            return end.value  # type: ignore[no-any-return]
        _drain(replies)
        replies = iter(ask_clients(ask))


def _drain(replies: Replies | None) -> None:
    for _ in replies or ():
        pass


@conversation(uses=USED_BY_THE_STANDARD_ROUND)
def standard_round(server: Server) -> Talk[None]:
    """Sample clients, send them what the plan says, let them train, absorb what comes back."""
    replies = yield server.ask("train", server.sample())
    server.absorb(replies)
