"""The backend of worker processes: they run clients in parallel, and their replies arrive in the fixed order.

The parent stages and commits all client states, so checkpoints and digests do not depend on the number of workers. A worker receives a
request and the states of its clients, and returns their outcomes. All tensors are in shared memory.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, TypeVar

from torch import Tensor

from polyfed.backends.base import Outcome, StagingBackend
from polyfed.backends.in_process import InProcess
from polyfed.backends.shared_memory import Json, Mark, SharedMemory, Spot, to_json, to_tree
from polyfed.backends.worker import Worker, rebuild_error, show
from polyfed.core.data_types import ClientData
from polyfed.core.rounds import Payload, Request
from polyfed.core.workbench import ClientState, Workbench
from polyfed.errors import ClientFailure, SettingError
from polyfed.trees import tensors_in

log = logging.getLogger("polyfed")
T = TypeVar("T")

MAX_DEATHS = 3
MAX_BYTES_AHEAD = 1 << 30


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
    """A worker's response to a task: outcomes, and an error if a client failed. ``size`` is the bytes of its tensors."""

    outcomes: Sequence[Outcome] = ()
    notes: Sequence[Json] = ()
    error: Exception | None = None
    size: int = 0


class Sending:
    """A request as it is sent to workers. Values for more than one client are copied once, for all workers."""

    def __init__(
        self, serial: int, request: Request, clients: Sequence[str], states: Mapping[str, ClientState], memory: SharedMemory
    ) -> None:
        self.serial, self.request, self.states, self.memory = serial, request, states, memory
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
        return Bundle(outcomes, response["notes"], error, sum(value.nbytes for value in own))


def repeated(things: Iterable[T]) -> dict[int, T]:
    """Return the objects that occur more than once, by id. The reference to each object prevents reuse of its id."""
    seen: set[int] = set()
    found: dict[int, T] = {}
    for thing in things:
        if id(thing) in seen:
            found[id(thing)] = thing
        seen.add(id(thing))
    return found


class Workers(StagingBackend):
    """Processes with one thread each, forked at the first request.

    Each worker has a separate backend of class ``base``, which runs one client at a time, or groups if it takes groups.
    A worker that dies is replaced, and its task is repeated.
    """

    def __init__(self, bench: Workbench, clients: Collection[ClientData], base: type[InProcess], count: int) -> None:
        if reason := workers_problem(bench):
            raise SettingError(f"--workers {bench.settings.workers}: {reason} Use --workers 1.")
        self.inner = base(bench, clients)
        super().__init__(bench, clients)
        self.count = count
        self.workers: list[Worker] = []
        self.memory: SharedMemory | None = None
        self.serial = 0
        self.running: dict[Worker, WorkerTask] = {}
        self.shown: dict[Any, Any] = {}
        self.finalizer = weakref.finalize(self, end_all, self.workers)

    def replace_data(self, clients: Collection[ClientData]) -> None:
        super().replace_data(clients)
        self.inner.replace_data(clients)

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        self.end(list(self.running))
        if any(worker.owner != os.getpid() for worker in self.workers):
            self.close()  # this process was forked, and the workers belong to its parent
        self.serial += 1
        if not clients:
            return
        if self.memory is None:
            self.memory = SharedMemory()
        sending = Sending(self.serial, request, clients, {client: self.current_state(client) for client in clients}, self.memory)
        turn = Turn(self, sending, self.tasks(request, clients))
        try:
            for bundle in turn.bundles():
                for note in bundle.notes:
                    show(note, self.shown)
                yield from bundle.outcomes
                if bundle.error is not None:
                    raise bundle.error
        finally:
            if self.serial == sending.serial:
                self.end(list(self.running))

    def tasks(self, request: Request, clients: Sequence[str]) -> list[WorkerTask]:
        """Return one task per evaluation group, per client or, if the inner backend trains groups, per worker."""
        if request.together:
            return [WorkerTask(place, group) for place, group in enumerate(self.inner.evaluation_groups(request, clients))]
        size = -(-len(clients) // self.count) if self.inner.takes_groups and request.what == "train" else 1
        groups = [clients[start : start + size] for start in range(0, len(clients), size)]
        return [WorkerTask(place, group) for place, group in enumerate(groups)]

    def free_worker(self) -> Worker | None:
        idle = [worker for worker in self.workers if worker not in self.running]
        if idle:
            return idle[0]
        if len(self.workers) == self.count:
            return None
        assert self.memory is not None
        try:
            self.workers.append(Worker(self.inner, self.memory))
        except OSError as error:
            raise ClientFailure(
                f"Cannot start worker process {len(self.workers) + 1} of {self.count}: {error.strerror}. Use fewer --workers."
            ) from error
        return self.workers[-1]

    def end(self, workers: Collection[Worker]) -> None:
        for worker in workers:
            worker.kill()
        for worker in workers:
            self.workers.remove(worker)
            self.running.pop(worker, None)
            worker.end()

    def close(self) -> None:
        super().close()
        self.serial += 1
        self.end(list(self.workers))
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class Turn:
    """Distributes the tasks of one request to idle workers and yields the responses in order."""

    def __init__(self, backend: Workers, sending: Sending, tasks: list[WorkerTask]) -> None:
        self.backend, self.sending, self.tasks = backend, sending, tasks
        self.waiting = [task.place for task in tasks]
        self.ready: dict[int, Bundle] = {}
        self.stop = len(tasks)

    def bundles(self) -> Iterator[Bundle]:
        """Yield the responses in order. Before each one, idle workers receive their next task."""
        for place in range(len(self.tasks)):
            if self.backend.serial != self.sending.serial:
                raise ClientFailure("The replies to a request were read after a later request, or after the backend was closed.")
            self.collect(timeout=0)
            self.hand_out()
            while place not in self.ready:
                self.collect(timeout=None)
                self.hand_out()
            yield self.ready.pop(place)

    def hand_out(self) -> None:
        """Send tasks to idle workers, but not too far ahead of the reader, and none after a failed task."""
        while self.waiting and self.waiting[0] < self.stop and sum(b.size for b in self.ready.values()) <= MAX_BYTES_AHEAD:
            worker = self.backend.free_worker()
            if worker is None:
                return
            task = self.tasks[heapq.heappop(self.waiting)]
            self.backend.running[worker] = task
            message = self.sending.message(task, worker)
            try:
                worker.pipe.send_bytes(message)
            except OSError:
                self.replace(worker)

    def collect(self, timeout: float | None) -> None:
        """Receive the responses of workers that have finished. Without a timeout, wait for at least one."""
        by_pipe = {worker.pipe: worker for worker in self.backend.running}
        for pipe in wait(list(by_pipe), timeout) if by_pipe else ():
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                response = json.loads(worker.pipe.recv_bytes())
            except (EOFError, OSError):
                self.replace(worker)
                continue
            task = self.backend.running.pop(worker)
            self.settle(task, self.sending.bundle(response, task, worker.response))

    def settle(self, task: WorkerTask, bundle: Bundle) -> None:
        self.ready[task.place] = bundle
        if bundle.error is not None:
            self.stop = min(self.stop, task.place)

    def replace(self, worker: Worker) -> None:
        """Remove a worker that has died, and repeat its task unless the task has killed too many workers."""
        task, request = self.backend.running.pop(worker), self.sending.request
        self.backend.workers.remove(worker)
        how = worker.end()
        task.deaths += 1
        if task.deaths < MAX_DEATHS:
            log.warning(
                "Round %d: lost the worker process of %s (%s). Repeating its work in another process.",
                request.round,
                task.label,
                how,
            )
            heapq.heappush(self.waiting, task.place)
            return
        advice = (
            "Memory probably ran out: use fewer --workers, a smaller --batch-size, or a smaller model."
            if how.endswith("SIGKILL")
            else "Run with --workers 1 to find the cause."
        )
        label = task.label[0].upper() + task.label[1:]
        text = f"{label}, round {request.round}, request {request.what!r}: lost {task.deaths} worker processes, the last one {how}. {advice}"
        self.settle(task, Bundle(error=ClientFailure(text)))


def end_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.kill()
    while workers:
        workers.pop().end()


def workers_problem(bench: Workbench) -> str:
    """Return the reason why worker processes cannot be used, or an empty string."""
    if not hasattr(os, "fork") or not hasattr(os, "memfd_create"):
        return "worker processes need Linux."
    devices = sorted({value.device.type for value in bench.live.values()} | {bench.settings.device})
    if any(device not in ("cpu", "auto") for device in devices):
        return f"worker processes train only on the CPU, but the model is on {', '.join(devices)}."
    if bench.settings.threads != 1:
        return f"worker processes have one thread each, which conflicts with --threads {bench.settings.threads}."
    return ""


def worker_count(bench: Workbench, clients: int, workers: str | None = None) -> int:
    """Return the number of worker processes for ``workers`` (default: the setting), at most one per client."""
    workers = bench.settings.workers if workers is None else workers
    if workers != "auto":
        return min(int(workers), clients) if int(workers) > 1 and clients > 1 else 1
    if workers_problem(bench):
        return 1
    return min(len(os.sched_getaffinity(0)), clients)
