"""The slots (hooks) of a method: one table row per slot. Checks, joining, the standard round, the recorder and the docs use the table.

A slot contains callables. Each slot has a protocol below, which mypy checks for every method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn

    from polyfed.core.client import Client, Step
    from polyfed.core.data_types import Federation
    from polyfed.core.evaluation import Newcomer
    from polyfed.core.replies import RequestContext
    from polyfed.core.rounds import Exchange, Payload, Reply
    from polyfed.core.server import Server

Extras: TypeAlias = "Mapping[str, Any]"
Entries: TypeAlias = "Mapping[str, Tensor]"


class Join(Enum):
    """Rules for combining a slot that two parts fill."""

    BY_STAGE = "by stage"
    IN_ORDER = "in order"
    SUMMED = "summed"
    MERGED = "merged; disagreement is an error"
    ONE_OWNER = "one owner"
    DISTINCT_NAMES = "distinct names"
    DISTINCT_BY_QUESTION = "distinct names per request"


class Population(Protocol):
    """Changes the clients and their data."""

    def __call__(self, federation: Federation, /) -> Federation: ...


class Surgery(Protocol):
    """Changes the model."""

    def __call__(self, model: nn.Module, /) -> nn.Module: ...


class HeadSurgery(Protocol):
    """Changes the model around its head, whose path it receives. It is an error if the head could not be detected."""

    @property
    def needs_head(self) -> bool:
        """True: it receives the path of the head."""

    def __call__(self, model: nn.Module, head: str, /) -> nn.Module: ...


class Receiving(Protocol):
    """Changes the entries that a client loads, in training and in evaluation."""

    def __call__(self, client: Client, entries: Entries, /) -> Entries: ...


class Sampling(Protocol):
    """Draws a client's batches of one round, as positions in its training data. A batch may be empty."""

    def __call__(self, client: Client, /) -> Iterator[Tensor]: ...


class RateFactor(Protocol):
    """Return the factor on the client learning rate, given the round (from 1) and the number of rounds."""

    def __call__(self, round_number: int, rounds: int, /) -> float: ...


class BatchGradient(Protocol):
    """Sets the gradient of every parameter from one batch, and returns the loss. The step has no logits yet."""

    def __call__(self, step: Step, /) -> Tensor: ...


class Inputs(Protocol):
    """Changes a training batch."""

    def __call__(self, client: Client, x: Tensor, y: Tensor, /) -> tuple[Tensor, Tensor]: ...


class AroundTraining(Protocol):
    """Runs before or after a client's steps. It returns extras to upload."""

    def __call__(self, client: Client, /) -> Extras | None: ...


class Term(Protocol):
    """A scalar of one training step."""

    def __call__(self, step: Step, /) -> Tensor: ...


class GradientChange(Protocol):
    """Changes gradients in place, after backward."""

    def __call__(self, step: Step, /) -> None: ...


class Upload(Protocol):
    """Changes entries before they are uploaded. The server inverts it with ``undo(server, entries)``."""

    def __call__(self, client: Client, entries: Entries, /) -> Entries: ...


class Answer(Protocol):
    """Reply of a client to a custom request."""

    def __call__(self, client: Client, payload: Payload, /) -> Payload | None: ...


class Predict(Protocol):
    """Class probabilities for preprocessed inputs."""

    def __call__(self, model: nn.Module, x: Tensor, /) -> Tensor: ...


class Outgoing(Protocol):
    """Entries to send to one client."""

    def __call__(self, server: Server, client: str, /) -> dict[str, Tensor]: ...


class SendExtras(Protocol):
    """One extra to send with a training request."""

    def __call__(self, server: Server, client: str, /) -> Any: ...


class Weighting(Protocol):
    """Weight of a reply in all averages."""

    def __call__(self, server: Server, reply: Reply, /) -> float: ...


class ServerStep(Protocol):
    """Turns the aggregate of the replies into the new state entries."""

    def __call__(self, server: Server, aggregate: dict[str, Tensor], /) -> Entries: ...


class AfterRound(Protocol):
    """Processes the extras of all valid replies."""

    def __call__(self, server: Server, extras: Mapping[str, Extras], /) -> None: ...


class ExchangeFunction(Protocol):
    """Exchange between the server and its clients."""

    def __call__(self, server: Server, /) -> Exchange[None]: ...


class NewcomerExchange(Protocol):
    """Exchange that returns the models for a newcomer."""

    def __call__(self, server: Server, /) -> Exchange[Newcomer]: ...


class ReplyEntries(Protocol):
    """Names of the entries in a reply. With ``trains = True`` clients train first: ``uploads`` and the extras of "train" apply."""

    def __call__(self, context: RequestContext, /) -> Sequence[str]: ...


@dataclass(frozen=True)
class Slot:
    """One slot.

    Attributes:
        name: Field of ``Method``.
        side: Where its code runs.
        meaning: Its arguments and its result.
        join: How to combine two parts that fill it.
        stages: Stages in execution order, if the order matters; "" is for parts without a stage.
        must_be_used: A custom round must declare that it uses the slot; otherwise parts that fill it are an error.
        given_server: Its code receives the server and may change its state in place.
        one_by_one: Clients of a method that fills it train one by one, with steps that are neither stacked nor compiled.
    """

    name: str
    side: str
    meaning: str
    join: Join
    stages: tuple[str, ...] = ()
    must_be_used: bool = False
    given_server: bool = False
    one_by_one: bool = False


_TABLE = (
    Slot(
        "surgery",
        "both",
        "model → model; with `needs_head`: model, path of the head → model",
        Join.BY_STAGE,
        ("blocks", "norm", "convolution", "features", ""),
    ),
    Slot(
        "receiving",
        "client",
        "client, entries → entries, on every receipt (training, evaluation)",
        Join.BY_STAGE,
        ("decode", "mix", ""),
        must_be_used=True,
    ),
    Slot("inputs", "client", "client, x, y → x, y", Join.BY_STAGE, ("augment", "style", ""), must_be_used=True),
    Slot("gradients", "client", "step → None, after backward", Join.BY_STAGE, ("correct", "mask", "", "clip"), must_be_used=True),
    Slot(
        "uploads",
        "client, inverted by the server",
        "client, entries → entries, just before sending",
        Join.BY_STAGE,
        ("", "clip", "noise", "compress"),
        must_be_used=True,
        given_server=True,
    ),
    Slot("before_training", "client", "client → extras or None", Join.IN_ORDER, must_be_used=True),
    Slot("after_training", "client", "client → extras or None", Join.IN_ORDER, must_be_used=True),
    Slot("objective", "client", "step → scalar, added to the task loss", Join.SUMMED, must_be_used=True),
    Slot(
        "sharing",
        "both",
        "sharing rules: which entries are sent, uploaded and kept, and how they are reduced",
        Join.MERGED,
        must_be_used=True,
    ),
    Slot("after_round", "server", "server, {client: extras} → None", Join.IN_ORDER, must_be_used=True, given_server=True),
    Slot("setup", "server", "exchange before round 1", Join.IN_ORDER, given_server=True),
    Slot("before_evaluation", "server", "exchange before an evaluation", Join.IN_ORDER, given_server=True),
    Slot("population", "both", "federation → federation (clients and their data)", Join.ONE_OWNER),
    Slot(
        "sampling",
        "client",
        "client → positions of each batch, replaces shuffled epochs",
        Join.ONE_OWNER,
        must_be_used=True,
        one_by_one=True,
    ),
    Slot(
        "batch_gradient",
        "client",
        "step → loss, replaces forward, loss and backward; `gradients` follow",
        Join.ONE_OWNER,
        must_be_used=True,
        one_by_one=True,
    ),
    Slot(
        "schedule",
        "client",
        "round, rounds → factor on the client learning rate; ignored if `--schedule` is not constant",
        Join.ONE_OWNER,
    ),
    Slot("task_loss", "client", "step → scalar, replaces the task loss", Join.ONE_OWNER, must_be_used=True),
    Slot("predict", "both", "model, x → probabilities", Join.ONE_OWNER),
    Slot("outgoing", "server", "server, client → entries for this client", Join.ONE_OWNER, must_be_used=True, given_server=True),
    Slot("weighting", "server", "server, reply → weight", Join.ONE_OWNER, must_be_used=True, given_server=True),
    Slot("server_step", "server", "server, aggregate → entries", Join.ONE_OWNER, must_be_used=True, given_server=True),
    Slot("round", "server", "exchange each round", Join.ONE_OWNER, given_server=True),
    Slot("newcomer", "server", "exchange that returns the models for a newcomer", Join.ONE_OWNER, given_server=True),
    Slot("answers", "client", "name → (client, payload → payload), a client's reply to a custom request", Join.DISTINCT_NAMES),
    Slot(
        "send_extras",
        "server",
        "name → (server, client → value), sent with a training request",
        Join.DISTINCT_NAMES,
        must_be_used=True,
        given_server=True,
    ),
    Slot(
        "reply_extras",
        "server",
        "request → name → declaration of an extra in its replies (`Number`, `Array`, ...); others are rejected",
        Join.DISTINCT_BY_QUESTION,
    ),
    Slot(
        "reply_entries",
        "server",
        "request → (context → names of the entries in its replies); others are rejected",
        Join.DISTINCT_NAMES,
    ),
)
SLOTS: Mapping[str, Slot] = {slot.name: slot for slot in _TABLE}
"""All slots by name, in the order of the fields of ``Method``."""

ONE_BY_ONE = tuple(slot.name for slot in _TABLE if slot.one_by_one)
"""Slots that replace the training step, so that clients train one by one."""

USED_BY_THE_STANDARD_ROUND = frozenset(slot.name for slot in _TABLE if slot.must_be_used)
