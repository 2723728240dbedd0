"""The server: its state, who takes part, what they weigh, and how replies become the next state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from polyfed.core.part import declared
from polyfed.core.reducers import Reduction, capped
from polyfed.core.replies import problem_with
from polyfed.core.rounds import TRAINING, Ask, Payload, Reply
from polyfed.core.seeds import chooser
from polyfed.errors import SettingError, TooFewReplies
from polyfed.tasks.known import CLASSIFICATION
from polyfed.tasks.task import Task

if TYPE_CHECKING:
    from torch import nn

    from polyfed.core.data_types import ClientData
    from polyfed.core.evaluation import Newcomer
    from polyfed.core.method import Method
    from polyfed.core.sharing import Phase, Plan
    from polyfed.settings import Settings

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
        """What the server gets to know of this client's data. ``tests`` are marks: equal ones stand for the same examples of the same domain."""
        tests = frozenset((domain, id(examples)) for domain, examples in data.tests.items())
        return cls(data.id, data.domains, len(data.train), tests)


def in_fixed_order(clients: Iterable[ClientInfo]) -> list[ClientInfo]:
    """Samples descending, then id: the order of sending and of summing, the same for every backend."""
    return sorted(clients, key=lambda info: (-info.samples, info.id))


@dataclass
class Server:
    """Everything the server knows. ``blueprint`` is the model's structure; ``state`` holds the values.

    ``notes`` are what the method noted of this round (``note``).
    ``partners`` are the clients of the ask that is being answered; ``absorbed`` how many replies went into the last aggregate.
    ``averaged`` holds clients' local entries as they were averaged once, where the clients cannot be asked any more; ``left`` the
    models that the method itself gave a newcomer then.
    ``input_shape`` and ``input_dtype`` are those of one prepared input, which the size of some answers depends on.
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
    notes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    asked: int = 0
    partners: tuple[str, ...] = ()
    absorbed: int = 0
    averaged: dict[str, Tensor] = field(default_factory=dict)
    left: Newcomer | None = None
    input_shape: tuple[int, ...] = ()
    input_dtype: torch.dtype = torch.float32
    task: Task = CLASSIFICATION

    def __post_init__(self) -> None:
        own = self.method.weighting
        if self.settings.max_weight_share is not None and own is not None and not declared(own).is_capped:
            raise SettingError(
                f"{self.method} weighs clients in its own way, so --max-weight-share would not be used. Leave it out."
            )
        self.introduce(self.clients)

    def introduce(self, clients: Iterable[ClientInfo]) -> None:
        """Know these clients, and no others."""
        self.clients = in_fixed_order(clients)
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
        self.rejected, self.notes = {}, {}

    def note(self, name: str, by_client: Mapping[str, float | Sequence[float]]) -> None:
        """Note numbers of this round by client, for whoever looks at the run; they are written to its metrics and change nothing."""
        self.notes[name] = dict(by_client)

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
            return self.method.outgoing(self, client)
        return {name: self.state[name] for name in self.phase.down if name in self.state}

    def message(self, client: str) -> Payload:
        extras = {name: make(self, client) for name, make in self.method.send_extras.items()}
        return Payload(self.outgoing(client), extras)

    def ask(self, what: str, clients: Sequence[str]) -> Ask:
        """An ask of this round to these clients, with the usual payload."""
        self.asked = len(clients)
        if self.method.outgoing is None and not self.method.send_extras:
            same = Payload(self.outgoing(""))
            return Ask(what, dict.fromkeys(clients, same), TRAINING, self.round, self.attempt)
        return Ask(what, {client: self.message(client) for client in clients}, TRAINING, self.round, self.attempt)

    def weight(self, reply: Reply) -> float:
        """The weight of a reply in every mean."""
        if self.method.weighting is not None:
            return float(self.method.weighting(self, reply))
        return self.usual_weight(reply.client)

    def usual_weight(self, client: str) -> float:
        """The weight of a client by the settings: its samples or 1, capped among the clients that were asked."""
        if self.settings.max_weight_share is None:
            return self.usual_weights([client])[client]
        return self.usual_weights(self.partners if client in self.partners else tuple(self.known))[client]

    def usual_weights(self, clients: Sequence[str]) -> dict[str, float]:
        """The weights of clients by the settings, none above its largest share of theirs."""
        by_samples, share = self.settings.weights == "samples", self.settings.max_weight_share
        weights = tuple(float(self.known[client].samples) if by_samples else 1.0 for client in clients)
        return dict(zip(clients, weights if share is None else capped(weights, share), strict=True))

    def absorb(self, replies: Iterable[Reply]) -> None:
        """Fold the replies into the next state, by the plan; bad replies are dropped with who and why."""
        reduction, extras = Reduction(self.phase.groups, self.state), {}
        for reply in replies:
            entries = self.accepted(reply)
            if entries is None:
                continue
            reduction.add(entries, self.weight(reply))
            extras[reply.client] = reply.extras
        self._require_enough(len(extras))
        self.absorbed = len(extras)
        aggregate = self.in_planned_types(reduction.finish())
        step = self.method.server_step
        self.state = {**self.state, **(aggregate if step is None else step(self, aggregate))}
        for hook in self.method.after_round:
            hook(self, extras)

    def in_planned_types(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.plan.entries[name].dtype) for name, value in entries.items()}

    def accepted(self, reply: Reply) -> Mapping[str, Tensor] | None:
        """The entries of a good reply to training, decoded; a bad one is rejected with who and why, and gives None.

        Replies that came through ``reply_checks.checked``, as all of a run do, are good.
        """
        if reply.decoded is not None:
            return reply.decoded
        entries = self.undone(reply.entries)
        problem = problem_with(entries, self.phase.up, self.plan.entries)
        if problem:
            self.reject(reply.client, problem)
            return None
        return entries

    def undone(self, entries: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Uploaded entries as they were before the method's ``uploads``; what cannot be decoded stays as it is."""
        for change in reversed(self.method.uploads):
            entries = declared(change).undo(self, entries)
        return entries

    def reject(self, client: str, why: str) -> None:
        """Drop a client's reply of this round."""
        self.rejected[client] = why
        self.ignore(client, why)

    def ignore(self, client: str, why: str) -> None:
        """Drop a reply, and hold it against nobody."""
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
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
        return value
    return saved
