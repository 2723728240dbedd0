"""The server: its state, who takes part, what they weigh, and how replies become the next state."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from polyfed.conversation import TRAINING, Ask, Payload, Reply
from polyfed.entries import Entry
from polyfed.errors import TooFewReplies
from polyfed.seeds import chooser

if TYPE_CHECKING:
    from torch import nn

    from polyfed.data.federation import ClientData
    from polyfed.method import Method
    from polyfed.settings import Settings
    from polyfed.sharing import Phase, Plan

log = logging.getLogger("polyfed")
T = TypeVar("T")
Bookmark: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client."""

    id: str
    domains: tuple[str, ...]
    samples: int
    tests: frozenset[Hashable] = frozenset()

    @classmethod
    def of(cls, data: ClientData) -> ClientInfo:
        """What is told of this client's data. ``tests`` are marks: equal ones stand for the same examples of the same domain."""
        tests = frozenset((domain, id(examples)) for domain, examples in data.tests.items())
        return cls(data.id, data.domains, len(data.train), tests)


def in_fixed_order(clients: Iterable[ClientInfo]) -> list[ClientInfo]:
    """Samples descending, then id: the order of sending and of summing, the same for every delivery."""
    return sorted(clients, key=lambda info: (-info.samples, info.id))


@dataclass
class Server:
    """Everything the server knows. ``blueprint`` is the model's structure; ``state`` holds the values.

    ``averaged`` holds clients' local entries as they were averaged once, where the clients cannot be asked any more.
    """

    method: Method
    plan: Plan
    settings: Settings
    clients: Sequence[ClientInfo]
    state: dict[str, Tensor]
    blueprint: nn.Module
    round: int = 0
    attempt: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    dormant: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    averaged: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clients = in_fixed_order(self.clients)
        self.known = {info.id: info for info in self.clients}
        self.ids = sorted(self.known)
        self.place = {info.id: place for place, info in enumerate(self.clients)}

    @property
    def rounds(self) -> int:
        """How many rounds the run has."""
        return self.settings.rounds

    @property
    def phase(self) -> Phase:
        """What travels in this round."""
        return self.plan.at(self.round)

    def begin(self, round_number: int, attempt: int) -> None:
        """Start a round, or repeat it."""
        self.round, self.attempt = round_number, attempt
        self.rejected = {}

    def bookmark(self) -> Bookmark:
        """The memory as it is now, for a round that may have to be repeated."""
        return dict(self.memory), dict(self.dormant)

    def go_back(self, bookmark: Bookmark) -> None:
        """Forget what was remembered since."""
        self.memory, self.dormant = (dict(part) for part in bookmark)

    def sample(self) -> list[str]:
        """The clients of this round, in the fixed order."""
        count = self.settings.sampled(len(self.clients))
        if count == len(self.clients):
            return [info.id for info in self.clients]
        chosen = chooser(self.settings.seed, "sample", self.round).sample(self.ids, count)
        return sorted(chosen, key=self.place.__getitem__)

    def outgoing(self, client: str) -> dict[str, Tensor]:
        """The entries this client is sent: by the method's own slot, or what the plan says."""
        if self.method.outgoing is not None:
            return self.method.outgoing(self, client)  # type: ignore[no-any-return]
        return {name: self.state[name] for name in self.phase.down if name in self.state}

    def message(self, client: str) -> Payload:
        """The payload of a training ask."""
        extras = {name: brief(self, client) for name, brief in self.method.briefing.items()}
        return Payload(self.outgoing(client), extras)

    def ask(self, what: str, clients: Sequence[str]) -> Ask:
        """An ask of this round to these clients, with the usual payload."""
        self.asked = len(clients)
        if self.method.outgoing is None and not self.method.briefing:
            same = Payload(self.outgoing(""))
            return Ask(what, dict.fromkeys(clients, same), TRAINING, self.round, self.attempt)
        return Ask(what, {client: self.message(client) for client in clients}, TRAINING, self.round, self.attempt)

    def weight(self, reply: Reply) -> float:
        """The weight of a reply in every mean."""
        if self.method.weighting is not None:
            return float(self.method.weighting(self, reply))
        return float(reply.samples) if self.settings.weights == "samples" else 1.0

    def absorb(self, replies: Iterable[Reply]) -> None:
        """Fold the replies into the next state, by the plan; bad replies are dropped with who and why."""
        phase, extras = self.phase, {}
        foldings = {
            names: reducer.start({n: self.state[n] for n in names if n in self.state}) for reducer, names in phase.groups.items()
        }
        for reply in replies:
            entries = self.accepted(reply)
            if entries is None:
                continue
            weight = self.weight(reply)
            for names, folding in foldings.items():
                folding.add({name: entries[name] for name in names if name in entries}, weight)
            extras[reply.client] = reply.extras
        self._require_enough(len(extras))
        aggregate = {name: value for folding in foldings.values() for name, value in folding.finish().items()}
        aggregate = {name: value.to(self.plan.entries[name].dtype) for name, value in aggregate.items()}
        step = self.method.server_step
        self.state = self.state | (aggregate if step is None else step(self, aggregate))
        for hook in self.method.after_round:
            hook(self, extras)

    def accepted(self, reply: Reply) -> Mapping[str, Tensor] | None:
        """The entries of a good reply, decoded; a bad one is rejected with who and why, and gives None."""
        entries = self._undone(reply.entries)
        problem = problem_with(entries, self.phase.up, self.plan.entries) or problem_with_extras(reply.extras)
        if problem:
            self.reject(reply.client, problem)
            return None
        return entries

    def sound(self, replies: Iterable[Reply], *needed: str) -> Iterator[Reply]:
        """For questions of a method's own: the replies that have these extras, all of them finite; others are rejected with who and why."""
        for reply in replies:
            problem = problem_with_extras(reply.extras, needed)
            if problem:
                self.reject(reply.client, problem)
            else:
                yield reply

    def _undone(self, entries: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for change in reversed(self.method.uploads):
            undo: Callable[..., Mapping[str, Tensor]] | None = getattr(change, "undo", None)
            entries = entries if undo is None else undo(self, entries)
        return entries

    def reject(self, client: str, why: str) -> None:
        """Drop a client's reply of this round."""
        self.rejected[client] = why
        log.warning("Round %d: the reply of client %s is dropped: %s", self.round, client, why)

    def _require_enough(self, answered: int) -> None:
        needed = self.settings.needed(self.asked)
        if answered < needed:
            raise TooFewReplies(
                f"Round {self.round}: {answered} of {self.asked} clients answered, {needed} are needed (--min-share {self.settings.min_share})."
            )

    def remember(self, key: str, make: Callable[[], T]) -> T:
        """Something the server keeps through the run and in checkpoints: an object with ``state_dict``, or plain values."""
        if key not in self.memory:
            value = make()
            if key in self.dormant:
                # A copy: a round that is repeated awakens it again, and optimizers step the tensors they are given in place.
                value = awakened(value, copy.deepcopy(self.dormant.pop(key)))
            self.memory[key] = value
        return self.memory[key]  # type: ignore[no-any-return]

    def remembered(self) -> dict[str, Any]:
        """The server's memory as plain values and tensors."""
        return self.dormant | {
            key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in self.memory.items()
        }


def awakened(value: Any, saved: Any) -> Any:
    """A remembered thing with its saved state."""
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
        return value
    return saved


def problem_with(entries: Mapping[str, Tensor], expected: Sequence[str], known: Mapping[str, Entry]) -> str:
    """Why these entries cannot be absorbed; empty when they can."""
    required = [name for name in expected if known[name].of is None]
    missing = [name for name in required if name not in entries]
    if missing:
        return f"{len(missing)} entries are missing, {missing[0]!r} first"
    allowed = set(expected)
    for name, value in entries.items():
        if name not in allowed:
            return f"{name!r} was not asked for"
        entry = known[name]
        if not isinstance(value, Tensor) or tuple(value.shape) != entry.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return f"{name!r} has the shape {found}, expected {entry.shape}"
        if value.dtype != entry.dtype:
            return f"{name!r} has the type {value.dtype}, expected {entry.dtype}"
    return next((f"{name!r} holds values that are not finite" for name, value in entries.items() if not all_finite(value)), "")


def problem_with_extras(extras: Mapping[str, Any], needed: Sequence[str] = ()) -> str:
    """Why what came beside the entries cannot be used; empty when it can."""
    missing = next((name for name in needed if name not in extras), None)
    if missing is not None:
        return f"{missing!r} is missing"
    return next((f"{name!r} holds values that are not finite" for name, value in extras.items() if not _is_finite(value)), "")


def _is_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    if isinstance(value, Tensor):
        return all_finite(value)
    return not isinstance(value, float) or math.isfinite(value)


def all_finite(value: Tensor) -> bool:
    """Whether every value is finite. A finite sum proves it at the speed of memory; only an infinite one needs a second look."""
    if not value.is_floating_point():
        return True
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
