"""A request on its way to worker processes: the clients of each task, the tensors that were copied for them, and the response."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from polyfed.backends.base import Outcome
from polyfed.backends.shared_memory import Json, Mark, SharedMemory, Spot, to_json, to_tree
from polyfed.backends.worker import Worker, rebuild_error
from polyfed.core.rounds import Payload, Request
from polyfed.core.workbench import ClientState
from polyfed.errors import ClientFailure
from polyfed.trees import tensors_in

T = TypeVar("T")


@dataclass
class WorkerTask:
    """Clients that one worker runs, and the tensors that were sent to this worker only."""

    place: int
    clients: Sequence[str]
    sent: list[Tensor] = field(default_factory=list)
    deaths: int = 0

    @property
    def label(self) -> str:
        return f"client {self.clients[0]}" + (f" and {len(self.clients) - 1} others" if len(self.clients) > 1 else "")


@dataclass(frozen=True)
class Bundle:
    """A worker's response to a task: outcomes, and an error if a client failed. ``size`` is the bytes of its tensors.

    ``answers`` are the predictions for single examples, if this process records them. ``killed`` is True if there is no response, because the
    system killed several workers.
    """

    outcomes: Sequence[Outcome] = ()
    answers: Mapping[tuple[str, str, str], Mapping[str, Tensor]] = field(default_factory=dict)
    notes: Sequence[Json] = ()
    error: Exception | None = None
    size: int = 0
    killed: bool = False


class Sending:
    """A request as it is sent to workers. Values for more than one client are copied once, for all workers."""

    def __init__(
        self,
        serial: int,
        request: Request,
        clients: Sequence[str],
        states: Mapping[str, ClientState],
        memory: SharedMemory,
        wants_answers: bool,
    ) -> None:
        self.serial, self.request, self.states, self.memory = serial, request, states, memory
        self.wants_answers = wants_answers
        self.payloads = {client: request.payloads[client] for client in clients}
        self.spots: list[Spot] = []
        self.shared: list[Tensor] = []
        self.places: dict[int, int] = {}
        self.trees: list[Json] = []
        self.tree_places: dict[int, int] = {}
        self.repeated_payloads = repeated(self.payloads.values())
        self.repeated = repeated(self._tensors(clients))
        memory.clear()

    def _tensors(self, clients: Sequence[str]) -> Iterator[Tensor]:
        """Yield all tensors; those of a payload for several clients twice, so that they count as repeated."""
        for payload in {id(payload): payload for payload in self.payloads.values()}.values():
            for _ in range(2 if id(payload) in self.repeated_payloads else 1):
                yield from tensors_in(payload.entries)
                yield from tensors_in(payload.extras)
        for client in clients:
            yield from {id(value): value for value in tensors_in(self.states[client].memory)}.values()

    def mark(self, value: Tensor, task: WorkerTask, request: SharedMemory, own: list[Spot]) -> Mark:
        """Copy a tensor to the memory of all workers or of this task, and return its mark."""
        if id(value) not in self.repeated:
            task.sent.append(value)
            own.append(request.put(value))
            return {"sent": len(own) - 1}
        if id(value) not in self.places:
            self.places[id(value)] = len(self.shared)
            self.shared.append(value)
            self.spots.append(self.memory.put(value))
        return {"shared": self.places[id(value)]}

    def message(self, task: WorkerTask, worker: Worker) -> bytes:
        if worker.serial != self.serial:
            worker.serial, worker.known_spots, worker.known_trees = self.serial, 0, 0
        own: list[Spot] = []
        task.sent = []
        worker.request.clear()

        def mark(value: Tensor) -> Mark:
            return self.mark(value, task, worker.request, own)

        request, clients = self.request, []
        try:
            for client in task.clients:
                payload, state = self.payload(self.payloads[client], mark), self.states[client]
                has_state = bool(state.entries or state.memory)
                clients.append([client, payload, to_json((state.entries, state.memory), mark) if has_state else None])
        except TypeError as error:
            raise ClientFailure(f"Round {request.round}, request {request.what!r} to {task.label}: {error}") from error
        message = {
            "request": [self.serial, request.what, request.purpose, request.round, request.attempt, request.together],
            "wants_answers": self.wants_answers,
            "spots": self.spots[worker.known_spots :],
            "trees": self.trees[worker.known_trees :],
            "own": own,
            "clients": clients,
        }
        worker.known_spots, worker.known_trees = len(self.spots), len(self.trees)
        return json.dumps(message).encode()

    def payload(self, payload: Payload, mark: Callable[[Tensor], Mark]) -> Json:
        if id(payload) not in self.repeated_payloads:
            return to_json((payload.entries, payload.extras), mark)
        if id(payload) not in self.tree_places:
            self.trees.append(to_json((payload.entries, payload.extras), mark))
            self.tree_places[id(payload)] = len(self.trees) - 1
        return self.tree_places[id(payload)]

    def bundle(self, response: Json, task: WorkerTask, memory: SharedMemory) -> Bundle:
        """Convert a worker's response, and copy its tensors out of shared memory."""
        own = [memory.view(Spot(*spot)).clone() for spot in response["own"]]

        def tensor(kind: str, place: int) -> Tensor:
            return {"own": own, "sent": task.sent, "shared": self.shared}[kind][place]

        outcomes = [
            Outcome(
                client,
                None if payload is None else Payload(*to_tree(payload, tensor)),
                self.states[client] if state is None else ClientState(*to_tree(state, tensor)),
                loss,
                problem,
                validation,
            )
            for client, payload, state, loss, problem, validation in response["outcomes"]
        ]
        error = rebuild_error(*response["error"]) if "error" in response else None
        answers = {tuple(key): to_tree(found, tensor) for key, found in response["answers"]}
        return Bundle(outcomes, answers, response["notes"], error, sum(value.nbytes for value in own))


def repeated(things: Iterable[T]) -> dict[int, T]:
    """Return the objects that occur more than once, by id. The reference to each object prevents reuse of its id."""
    seen: set[int] = set()
    found: dict[int, T] = {}
    for thing in things:
        if id(thing) in seen:
            found[id(thing)] = thing
        seen.add(id(thing))
    return found
