"""The server: its state, client sampling, client weights, and aggregation."""

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
    """Information about a client that is available to the server.

    Attributes:
        id: Client name.
        domains: Domains of its training data.
        samples: Number of training samples.
        test_set_ids: One identifier per test set. Equal identifiers mean the same test examples of the same domain.
    """

    id: str
    domains: tuple[str, ...]
    samples: int
    test_set_ids: frozenset[Hashable] = frozenset()

    @classmethod
    def from_data(cls, data: ClientData) -> ClientInfo:
        """Summarise a client's data for the server."""
        test_set_ids = frozenset((domain, id(examples)) for domain, examples in data.tests.items())
        return cls(data.id, data.domains, len(data.train), test_set_ids)


def canonical_order(clients: Iterable[ClientInfo]) -> list[ClientInfo]:
    """Sort clients by number of samples (descending), then by id.

    Every backend sends requests and sums replies in this order, so that results do not depend on the backend.
    """
    return sorted(clients, key=lambda info: (-info.samples, info.id))


@dataclass
class Server:
    """State and behaviour of the server.

    Attributes:
        method: Method of the run.
        plan: Which entries are sent and uploaded in each round.
        settings: Settings of the run.
        clients: All clients, in canonical order.
        state: Current value of every entry.
        blueprint: Model structure. Its values are not used; they are in ``state``.
        round: Current round; 0 before the first one.
        attempt: Attempt within the round, starting at 0.
        memory: Objects created with :meth:`persistent`.
        restored_memory: State loaded from a checkpoint for objects that have not been created yet.
        rejected: Reason for each reply that was rejected in this round, by client.
        client_metrics: Values logged with :meth:`log_client_metric` in this round.
        num_requested: Number of clients in the current request.
        requested_clients: Ids of the clients in the current request.
        num_aggregated: Number of replies in the last aggregate.
        averaged_local_entries: Average of the clients' local entries, collected once, for use when clients are unreachable.
        saved_newcomer: Newcomer models that the method produced while its clients were still reachable.
        input_shape: Shape of one preprocessed input. The size of some replies depends on it.
        input_dtype: Type of one preprocessed input.
        task: Task of the run.
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
        weighting = self.method.weighting
        if self.settings.max_weight_share is not None and weighting is not None and not declared(weighting).is_capped:
            raise SettingError(
                f"--max-weight-share has no effect with {self.method}, which defines its own client weights. Remove the option."
            )
        self.set_clients(self.clients)

    def set_clients(self, clients: Iterable[ClientInfo]) -> None:
        """Replace the set of clients."""
        self.clients = canonical_order(clients)
        self.client_info = {info.id: info for info in self.clients}
        self.client_ids = sorted(self.client_info)
        self.position = {info.id: position for position, info in enumerate(self.clients)}

    @property
    def rounds(self) -> int:
        """Number of rounds in the run."""
        return self.settings.rounds

    @property
    def phase(self) -> Phase:
        """Sharing plan of the current round."""
        return self.plan.at(self.round)

    def start_round(self, round_number: int, attempt: int) -> None:
        """Start or retry a round."""
        self.round, self.attempt = round_number, attempt
        self.rejected, self.client_metrics = {}, {}

    def log_client_metric(self, name: str, by_client: Mapping[str, float | Sequence[float]]) -> None:
        """Log one value per client for this round. Logged values are written to the metrics and do not affect training."""
        self.client_metrics[name] = dict(by_client)

    def snapshot_memory(self) -> MemorySnapshot:
        """Return a shallow copy of the memory, to restore if the round has to be retried."""
        return dict(self.memory), dict(self.restored_memory)

    def restore_memory(self, snapshot: MemorySnapshot) -> None:
        """Restore the memory from a snapshot."""
        self.memory, self.restored_memory = (dict(part) for part in snapshot)

    def sample_clients(self) -> list[str]:
        """Sample the clients of this round, in canonical order."""
        count = self.settings.sampled(len(self.clients))
        if count == len(self.clients):
            return [info.id for info in self.clients]
        chosen = chooser(self.settings.seed, "sample", self.round).sample(self.client_ids, count)
        return sorted(chosen, key=self.position.__getitem__)

    def outgoing(self, client: str) -> dict[str, Tensor]:
        """Return the entries to send to a client: from the method's ``outgoing`` slot, or as the plan specifies."""
        if self.method.outgoing is not None:
            return self.method.outgoing(self, client)
        return {name: self.state[name] for name in self.phase.down if name in self.state}

    def training_payload(self, client: str) -> Payload:
        """Return the payload of a training request for one client."""
        extras = {name: make(self, client) for name, make in self.method.send_extras.items()}
        return Payload(self.outgoing(client), extras)

    def request(self, what: str, clients: Sequence[str]) -> Request:
        """Create a request to the given clients for the current round, with the training payload."""
        self.num_requested = len(clients)
        if self.method.outgoing is None and not self.method.send_extras:
            shared_payload = Payload(self.outgoing(""))
            return Request(what, dict.fromkeys(clients, shared_payload), TRAINING, self.round, self.attempt)
        return Request(what, {client: self.training_payload(client) for client in clients}, TRAINING, self.round, self.attempt)

    def weight(self, reply: Reply) -> float:
        """Return the weight of a reply in all averages."""
        if self.method.weighting is not None:
            return float(self.method.weighting(self, reply))
        return self.default_weight(reply.client)

    def default_weight(self, client: str) -> float:
        """Return the weight of a client according to the settings: its samples or 1, capped among the requested clients."""
        if self.settings.max_weight_share is None:
            return self.default_weights([client])[client]
        return self.default_weights(self.requested_clients if client in self.requested_clients else tuple(self.client_info))[client]

    def default_weights(self, clients: Sequence[str]) -> dict[str, float]:
        """Return the weights of several clients according to the settings, each capped at ``max_weight_share`` of their sum."""
        by_samples, share = self.settings.weights == "samples", self.settings.max_weight_share
        weights = tuple(float(self.client_info[client].samples) if by_samples else 1.0 for client in clients)
        return dict(zip(clients, weights if share is None else capped(weights, share), strict=True))

    def aggregate(self, replies: Iterable[Reply]) -> None:
        """Aggregate the replies into the next state, as the plan specifies. Invalid replies are rejected and logged.

        Raises:
            TooFewReplies: If fewer than ``min_share`` of the requested clients sent a valid reply.
        """
        reduction, extras = Reduction(self.phase.groups, self.state), {}
        for reply in replies:
            entries = self.validated_entries(reply)
            if entries is None:
                continue
            reduction.add(entries, self.weight(reply))
            extras[reply.client] = reply.extras
        self._require_min_replies(len(extras))
        self.num_aggregated = len(extras)
        aggregated = self.cast_to_plan(reduction.finish())
        step = self.method.server_step
        self.state = {**self.state, **(aggregated if step is None else step(self, aggregated))}
        for hook in self.method.after_round:
            hook(self, extras)

    def cast_to_plan(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Cast entries to the types in the plan. Reductions may use wider types."""
        return {name: value.to(self.plan.entries[name].dtype) for name, value in entries.items()}

    def validated_entries(self, reply: Reply) -> Mapping[str, Tensor] | None:
        """Return the decoded entries of a training reply, or reject the reply and return None.

        Replies that passed ``replies.checked``, as all replies of a run do, are already decoded and valid.
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
        """Invert the method's ``uploads`` transforms. Entries that cannot be decoded are returned unchanged."""
        for transform in reversed(self.method.uploads):
            entries = declared(transform).undo(self, entries)
        return entries

    def reject(self, client: str, reason: str) -> None:
        """Reject the reply of a client, and record the reason."""
        self.rejected[client] = reason
        self.drop_reply(client, reason)

    def drop_reply(self, client: str, reason: str) -> None:
        """Drop a reply without marking the client as rejected."""
        log.warning("Round %d: dropped the reply of client %s: %s", self.round, client, reason)

    def _require_min_replies(self, num_replies: int) -> None:
        required = self.settings.needed(self.num_requested)
        if num_replies < required:
            raise TooFewReplies(
                f"Round {self.round}: {num_replies} of {self.num_requested} clients sent a valid reply; "
                f"--min-share {self.settings.min_share} requires {required}."
            )

    def persistent(self, key: str, factory: Callable[[], T]) -> T:
        """Return an object that persists across rounds and checkpoints, and create it on first use.

        Args:
            key: Name of the object.
            factory: Creates the object: one with ``state_dict`` and ``load_state_dict``, or plain values and tensors.
        """
        if key not in self.memory:
            value = factory()
            if key in self.restored_memory:
                # Copy the saved state: a retried round restores it again, and optimizers update its tensors in place.
                value = restore_object(value, copy.deepcopy(self.restored_memory.pop(key)))
            self.memory[key] = value
        return self.memory[key]  # type: ignore[no-any-return]

    def memory_state(self) -> dict[str, Any]:
        """Return the memory as plain values and tensors, for a checkpoint."""
        return self.restored_memory | {
            key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in self.memory.items()
        }


def restore_object(value: Any, saved: Any) -> Any:
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
        return value
    return saved
