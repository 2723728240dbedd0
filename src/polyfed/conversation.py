"""Conversations: a generator yields an Ask and is given the replies; the loop only carries them.

One message per run, per round or per layer is the same code. ``deliver`` is what differs between worlds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from polyfed.server import Server

TRAINING, EVALUATION, NEWCOMER = "training", "evaluation", "newcomer"


@dataclass(frozen=True)
class Payload:
    """What a message carries: ``entries`` of the state, and ``extras``: anything else (numbers, text, tensors, lists and dicts of them)."""

    entries: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """A question to some clients, with a payload for each. ``purpose`` keeps the costs of training, evaluation and newcomers apart."""

    what: str
    payloads: Mapping[str, Payload]
    purpose: str = TRAINING
    round: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class Reply:
    """One client's answer."""

    client: str
    payload: Payload
    samples: int

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
Deliver: TypeAlias = Callable[[Ask], Replies]

F = TypeVar("F", bound=Callable[..., Any])


def conversation(uses: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Mark a round of one's own with the slots it uses; a part that fills another slot is then an error, not ignored."""

    def mark(talk: F) -> F:
        talk.uses = frozenset(uses)  # type: ignore[attr-defined]
        return talk

    return mark


def converse(talk: Talk[T], deliver: Deliver) -> T:
    """Carry each question to the clients, and their replies back, until it ends.

    Replies are lazy; those the conversation did not look at are still delivered before the next question.
    """
    replies: Replies | None = None
    while True:
        try:
            ask = talk.send(replies)  # type: ignore[arg-type]
        except StopIteration as end:
            _drain(replies)
            return end.value  # type: ignore[no-any-return]
        _drain(replies)
        replies = iter(deliver(ask))


def _drain(replies: Replies | None) -> None:
    for _ in replies or ():
        pass


@conversation(
    uses=("sharing", "receiving", "inputs", "before_training", "after_training", "objective", "task_loss", "gradients", "uploads")
    + ("outgoing", "briefing", "weighting", "server_step", "after_round")
)
def standard_round(server: Server) -> Talk[None]:
    """Sample clients, send them what the plan says, let them train, absorb what comes back."""
    replies = yield server.ask("train", server.sample())
    server.absorb(replies)
