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
from polyfed.core.rounds import TRAINING, Payload, Reply, Request
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
MemorySnapshot: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client."""

    id: str
    domains: tuple[str, ...]
    samples: int
    test_set_ids: frozenset[Hashable] = frozenset()

    @classmethod
    def from_data(cls, data: ClientData) -> ClientInfo:
        """What the server gets to know of this client's data. ``tests`` are marks: equal ones stand for the same examples of the same domain."""
        tests = frozenset((domain, id(examples)) for domain, examples in data.tests.items())
        return cls(data.id, data.domains, len(data.train), tests)


def canonical_order(clients: Iterable[ClientInfo]) -> list[ClientInfo]:
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
    restored_memory: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    client_metrics: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    num_requested: int = 0
    requested_clients: tuple[str, ...] = ()
    num_aggregated: int = 0
    averaged_local_entries: dict[str, Tensor] = field(default_factory=dict)
    saved_newcomer: Newcomer | None = None
    input_shape: tuple[int, ...] = ()
    input_dtype: torch.dtype = torch.float32
    task: Task = CLASSIFICATION

    def __post_init__(self) -> None:
        own = self.method.weighting
        if self.settings.max_weight_share is not None and own is not None and not declared(own).is_capped:
            raise SettingError(
                f"{self.method} weighs clients in its own way, so --max-weight-share would not be used. Leave it out."
            )
        self.set_clients(self.clients)

    def set_clients(self, clients: Iterable[ClientInfo]) -> None:
        """Know these clients, and no others."""
        self.clients = canonical_order(clients)
        self.client_info = {info.id: info for info in self.clients}
        self.client_ids = sorted(self.client_info)
        self.position = {info.id: place for place, info in enumerate(self.clients)}

    @property
    def rounds(self) -> int:
        """How many rounds the run has."""
        return self.settings.rounds

    @property
    def phase(self) -> Phase:
        """What travels in this round."""
        return self.plan.at(self.round)

    def start_round(self, round_number: int, attempt: int) -> None:
        """Start a round, or repeat it."""
        self.round, self.attempt = round_number, attempt
        self.rejected, self.client_metrics = {}, {}

    def log_client_metric(self, name: str, by_client: Mapping[str, float | Sequence[float]]) -> None:
        """Note numbers of this round by client, for whoever looks at the run; they are written to its metrics and change nothing."""
        self.client_metrics[name] = dict(by_client)

    def snapshot_memory(self) -> MemorySnapshot:
        """The memory as it is now, for a round that may have to be repeated."""
        return dict(self.memory), dict(self.restored_memory)

    def restore_memory(self, bookmark: MemorySnapshot) -> None:
        """Forget what was remembered since."""
        self.memory, self.restored_memory = (dict(part) for part in bookmark)

    def sample_clients(self) -> list[str]:
        """The clients of this round, in the fixed order."""
        count = self.settings.sampled(len(self.clients))
        if count == len(self.clients):
            return [info.id for info in self.clients]
        chosen = chooser(self.settings.seed, "sample", self.round).sample(self.client_ids, count)
        return sorted(chosen, key=self.position.__getitem__)

    def outgoing(self, client: str) -> dict[str, Tensor]:
        """The entries this client is sent: by the method's own slot, or what the plan says."""
        if self.method.outgoing is not None:
            return self.method.outgoing(self, client)
        return {name: self.state[name] for name in self.phase.down if name in self.state}

    def training_payload(self, client: str) -> Payload:
        extras = {name: make(self, client) for name, make in self.method.send_extras.items()}
        return Payload(self.outgoing(client), extras)

    def request(self, what: str, clients: Sequence[str]) -> Request:
        """An ask of this round to these clients, with the usual payload."""
        self.num_requested = len(clients)
        if self.method.outgoing is None and not self.method.send_extras:
            same = Payload(self.outgoing(""))
            return Request(what, dict.fromkeys(clients, same), TRAINING, self.round, self.attempt)
        return Request(what, {client: self.training_payload(client) for client in clients}, TRAINING, self.round, self.attempt)

    def weight(self, reply: Reply) -> float:
        """The weight of a reply in every mean."""
        if self.method.weighting is not None:
            return float(self.method.weighting(self, reply))
        return self.default_weight(reply.client)

    def default_weight(self, client: str) -> float:
        """The weight of a client by the settings: its samples or 1, capped among the clients that were asked."""
        if self.settings.max_weight_share is None:
            return self.default_weights([client])[client]
        return self.default_weights(self.requested_clients if client in self.requested_clients else tuple(self.client_info))[client]

    def default_weights(self, clients: Sequence[str]) -> dict[str, float]:
        """The weights of clients by the settings, none above its largest share of theirs."""
        by_samples, share = self.settings.weights == "samples", self.settings.max_weight_share
        weights = tuple(float(self.client_info[client].samples) if by_samples else 1.0 for client in clients)
        return dict(zip(clients, weights if share is None else capped(weights, share), strict=True))

    def aggregate(self, replies: Iterable[Reply]) -> None:
        """Fold the replies into the next state, by the plan; bad replies are dropped with who and why."""
        reduction, extras = Reduction(self.phase.groups, self.state), {}
        for reply in replies:
            entries = self.validated_entries(reply)
            if entries is None:
                continue
            reduction.add(entries, self.weight(reply))
            extras[reply.client] = reply.extras
        self._require_min_replies(len(extras))
        self.num_aggregated = len(extras)
        aggregate = self.cast_to_plan(reduction.finish())
        step = self.method.server_step
        self.state = {**self.state, **(aggregate if step is None else step(self, aggregate))}
        for hook in self.method.after_round:
            hook(self, extras)

    def cast_to_plan(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.plan.entries[name].dtype) for name, value in entries.items()}

    def validated_entries(self, reply: Reply) -> Mapping[str, Tensor] | None:
        """The entries of a good reply to training, decoded; a bad one is rejected with who and why, and gives None.

        Replies that came through ``reply_checks.checked``, as all of a run do, are good.
        """
        if reply.decoded is not None:
            return reply.decoded
        entries = self.decode_uploads(reply.entries)
        problem = problem_with(entries, self.phase.up, self.plan.entries)
        if problem:
            self.reject(reply.client, problem)
            return None
        return entries

    def decode_uploads(self, entries: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Uploaded entries as they were before the method's ``uploads``; what cannot be decoded stays as it is."""
        for change in reversed(self.method.uploads):
            entries = declared(change).undo(self, entries)
        return entries

    def reject(self, client: str, why: str) -> None:
        """Drop a client's reply of this round."""
        self.rejected[client] = why
        self.drop_reply(client, why)

    def drop_reply(self, client: str, why: str) -> None:
        """Drop a reply, and hold it against nobody."""
        log.warning("Round %d: the reply of client %s is dropped: %s", self.round, client, why)

    def _require_min_replies(self, answered: int) -> None:
        needed = self.settings.needed(self.num_requested)
        if answered < needed:
            raise TooFewReplies(
                f"Round {self.round}: {answered} of {self.num_requested} clients answered, {needed} are needed (--min-share {self.settings.min_share})."
            )

    def persistent(self, key: str, make: Callable[[], T]) -> T:
        """Something the server keeps through the run and in checkpoints: an object with ``state_dict``, or plain values."""
        if key not in self.memory:
            value = make()
            if key in self.restored_memory:
                # A copy: a round that is repeated awakens it again, and optimizers step the tensors they are given in place.
                value = restore_object(value, copy.deepcopy(self.restored_memory.pop(key)))
            self.memory[key] = value
        return self.memory[key]  # type: ignore[no-any-return]

    def memory_state(self) -> dict[str, Any]:
        """The server's memory as plain values and tensors."""
        return self.restored_memory | {
            key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in self.memory.items()
        }


def restore_object(value: Any, saved: Any) -> Any:
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
        return value
    return saved
