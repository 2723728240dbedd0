"""The backend of worker processes: clients are trained in parallel, and their answers are passed on in the fixed order.

The parent owns what clients keep, what is staged and what is committed, so checkpoints and digests are the same for any number
of workers. A worker gets what was asked and what its clients keep, and returns what came of it; all tensors lie in shared memory.
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
from polyfed.backends.shared_memory import Json, Mark, SharedMemory, Spot, joined, parted
from polyfed.backends.worker import Worker, failure, show
from polyfed.core.data_types import ClientData
from polyfed.core.rounds import Payload, Request
from polyfed.core.workbench import ClientState, Workbench
from polyfed.errors import ClientFailure, SettingError
from polyfed.trees import tensors_in

log = logging.getLogger("polyfed")
T = TypeVar("T")

DEATHS_ALLOWED = 3
BYTES_AHEAD = 1 << 30


@dataclass
class WorkerTask:
    """Some clients that one worker answers for, and the tensors that were sent to it for them only."""

    place: int
    clients: Sequence[str]
    sent: list[Tensor] = field(default_factory=list)
    deaths: int = 0

    @property
    def words(self) -> str:
        return f"client {self.clients[0]}" + (f" and {len(self.clients) - 1} others" if len(self.clients) > 1 else "")


@dataclass(frozen=True)
class Bundle:
    """What a worker answered for a group of clients: outcomes, then perhaps an error. ``size`` is its bytes of tensors."""

    outcomes: Sequence[Outcome] = ()
    notes: Sequence[Json] = ()
    error: Exception | None = None
    size: int = 0


class Sending:
    """One ask as it is sent to workers. What more than one client gets is laid out once, for all workers."""

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
        """Every tensor as often as it counts: that of a payload for many, twice."""
        for payload in {id(payload): payload for payload in self.payloads.values()}.values():
            for _ in range(2 if id(payload) in self.repeated_payloads else 1):
                yield from tensors_in(payload.entries)
                yield from tensors_in(payload.extras)
        for client in clients:
            yield from {id(value): value for value in tensors_in(self.states[client].memory)}.values()

    def mark(self, value: Tensor, task: WorkerTask, request: SharedMemory, own: list[Spot]) -> Mark:
        """Lay a tensor out, for all workers or for this task, and say how it is called."""
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
        """The message to a worker; what it knows of this ask already is left out."""
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
                keeps = bool(state.entries or state.memory)
                clients.append([client, payload, parted((state.entries, state.memory), mark) if keeps else None])
        except TypeError as error:
            raise ClientFailure(f"Round {request.round}, question {request.what!r} to {task.words}: {error}") from error
        message = {
            "ask": [self.serial, request.what, request.purpose, request.round, request.attempt, request.together],
            "spots": self.spots[worker.known_spots :],
            "trees": self.trees[worker.known_trees :],
            "own": own,
            "clients": clients,
        }
        worker.known_spots, worker.known_trees = len(self.spots), len(self.trees)
        return json.dumps(message).encode()

    def payload(self, payload: Payload, mark: Callable[[Tensor], Mark]) -> Json:
        """A payload as JSON, or its number where several clients get the same one."""
        if id(payload) not in self.repeated_payloads:
            return parted((payload.entries, payload.extras), mark)
        if id(payload) not in self.tree_places:
            self.trees.append(parted((payload.entries, payload.extras), mark))
            self.tree_places[id(payload)] = len(self.trees) - 1
        return self.tree_places[id(payload)]

    def received(self, answer: Json, task: WorkerTask, response: SharedMemory) -> Bundle:
        """What a worker answered, copied out of shared memory."""
        own = [response.view(Spot(*spot)).clone() for spot in answer["own"]]

        def tensor(kind: str, place: int) -> Tensor:
            return {"own": own, "sent": task.sent, "shared": self.shared}[kind][place]

        outcomes = [
            Outcome(
                client,
                None if payload is None else Payload(*joined(payload, tensor)),
                self.states[client] if state is None else ClientState(*joined(state, tensor)),
                loss,
                problem,
                validation,
            )
            for client, payload, state, loss, problem, validation in answer["outcomes"]
        ]
        error = failure(*answer["error"]) if "error" in answer else None
        return Bundle(outcomes, answer["notes"], error, sum(value.nbytes for value in own))


def repeated(things: Iterable[T]) -> dict[int, T]:
    """Those things that come more than once, by id; they are stored, so that no other can take their id."""
    seen: set[int] = set()
    found: dict[int, T] = {}
    for thing in things:
        if id(thing) in seen:
            found[id(thing)] = thing
        seen.add(id(thing))
    return found


class Workers(StagingBackend):
    """A number of processes with one thread each, forked when there is something to do.

    Each has a backend of its own (``base``), which answers for one client at a time, or for groups where that is its strength.
    A worker that dies is replaced, and what it was doing is done again.
    """

    def __init__(self, bench: Workbench, clients: Collection[ClientData], base: type[InProcess], count: int) -> None:
        if reason := why_impossible(bench):
            raise SettingError(f"--workers {bench.settings.workers}: {reason} Use --workers 1.")
        self.inner = base(bench, clients)
        super().__init__(bench, clients)
        self.count = count
        self.workers: list[Worker] = []
        self.memory: SharedMemory | None = None
        self.serial = 0
        self.at_work: dict[Worker, WorkerTask] = {}
        self.shown: dict[Any, Any] = {}
        self.finalizer = weakref.finalize(self, end_all, self.workers)

    def replace_data(self, clients: Collection[ClientData]) -> None:
        super().replace_data(clients)
        self.inner.replace_data(clients)

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        self.end(list(self.at_work))
        if any(worker.owner != os.getpid() for worker in self.workers):
            self.close()  # this process is a copy, and the workers are those of the original
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
                self.end(list(self.at_work))

    def tasks(self, request: Request, clients: Sequence[str]) -> list[WorkerTask]:
        """Clients one by one, or those that are scored together; to train, in as many groups as there are workers where the backend inside is made for groups."""
        if request.together:
            return [WorkerTask(place, group) for place, group in enumerate(self.inner.scored_together(request, clients))]
        size = -(-len(clients) // self.count) if self.inner.takes_groups and request.what == "train" else 1
        groups = [clients[start : start + size] for start in range(0, len(clients), size)]
        return [WorkerTask(place, group) for place, group in enumerate(groups)]

    def free_worker(self) -> Worker | None:
        """A worker with nothing to do, a new one where there may be more; None when all are busy."""
        idle = [worker for worker in self.workers if worker not in self.at_work]
        if idle:
            return idle[0]
        if len(self.workers) == self.count:
            return None
        assert self.memory is not None
        try:
            self.workers.append(Worker(self.inner, self.memory))
        except OSError as error:
            raise ClientFailure(
                f"Worker process {len(self.workers) + 1} of {self.count} cannot be started: {error.strerror}. Use fewer --workers."
            ) from error
        return self.workers[-1]

    def end(self, workers: Collection[Worker]) -> None:
        """End some workers, whatever they are doing."""
        for worker in workers:
            worker.kill()
        for worker in workers:
            self.workers.remove(worker)
            self.at_work.pop(worker, None)
            worker.end()

    def close(self) -> None:
        """End all workers; the next ask starts new ones."""
        super().close()
        self.serial += 1
        self.end(list(self.workers))
        if self.memory is not None:
            self.memory.close()
            self.memory = None


class Turn:
    """One ask at work: tasks are handed to whoever is free, and what came of them is given on in order."""

    def __init__(self, backend: Workers, sending: Sending, tasks: list[WorkerTask]) -> None:
        self.backend, self.sending, self.tasks = backend, sending, tasks
        self.waiting = [task.place for task in tasks]
        self.ready: dict[int, Bundle] = {}
        self.stop = len(tasks)

    def bundles(self) -> Iterator[Bundle]:
        """The answers, in order. Whenever one is fetched, workers that have finished get their next task first."""
        for place in range(len(self.tasks)):
            if self.backend.serial != self.sending.serial:
                raise ClientFailure("The replies to a question were read on after another was asked, or after the end of the run.")
            self.collect(timeout=0)
            self.hand_out()
            while place not in self.ready:
                self.collect(timeout=None)
                self.hand_out()
            yield self.ready.pop(place)

    def hand_out(self) -> None:
        """Give tasks to free workers, not too far ahead of what is fetched, and none behind a failure."""
        while self.waiting and self.waiting[0] < self.stop and sum(b.size for b in self.ready.values()) <= BYTES_AHEAD:
            worker = self.backend.free_worker()
            if worker is None:
                return
            task = self.tasks[heapq.heappop(self.waiting)]
            self.backend.at_work[worker] = task
            message = self.sending.message(task, worker)
            try:
                worker.line.send_bytes(message)
            except OSError:
                self.bury(worker)

    def collect(self, timeout: float | None) -> None:
        """Take in what workers have finished; wait for one of them where there is no timeout."""
        by_line = {worker.line: worker for worker in self.backend.at_work}
        for line in wait(list(by_line), timeout) if by_line else ():
            worker = by_line[line]  # type: ignore[index]
            try:
                answer = json.loads(worker.line.recv_bytes())
            except (EOFError, OSError):
                self.bury(worker)
                continue
            task = self.backend.at_work.pop(worker)
            self.settle(task, self.sending.received(answer, task, worker.response))

    def settle(self, task: WorkerTask, bundle: Bundle) -> None:
        self.ready[task.place] = bundle
        if bundle.error is not None:
            self.stop = min(self.stop, task.place)

    def bury(self, worker: Worker) -> None:
        """Let go of a worker that has died; its task is done again by another, but not for ever."""
        task = self.backend.at_work.pop(worker)
        self.backend.workers.remove(worker)
        how = worker.end()
        task.deaths += 1
        if task.deaths == DEATHS_ALLOWED:
            self.settle(task, Bundle(error=ClientFailure(deadly(self.sending.request, task, how))))
            return
        log.warning(
            "Round %d: the worker process of %s was lost (%s). It is replaced, and the work done again.",
            self.sending.request.round,
            task.words,
            how,
        )
        heapq.heappush(self.waiting, task.place)


def deadly(request: Request, task: WorkerTask, how: str) -> str:
    """The sentence about a task that no worker survives."""
    cause = (
        "Most likely memory ran out: use fewer --workers, a smaller --batch-size, or a smaller model."
        if how.endswith("SIGKILL")
        else "Run with --workers 1 to see what happens."
    )
    who = task.words[0].upper() + task.words[1:]
    return f"{who}, round {request.round}, question {request.what!r}: {task.deaths} worker processes were lost at it, the last one {how}. {cause}"


def end_all(workers: list[Worker]) -> None:
    """End workers whose backend is gone."""
    for worker in workers:
        worker.kill()
    while workers:
        workers.pop().end()


def why_impossible(bench: Workbench) -> str:
    """Why workers cannot be used; empty when they can."""
    if not hasattr(os, "fork") or not hasattr(os, "memfd_create"):
        return "worker processes share memory in a way that only Linux has."
    devices = sorted({value.device.type for value in bench.live.values()} | {bench.settings.device})
    if any(device not in ("cpu", "auto") for device in devices):
        return f"worker processes train on the cpu only, and the model is trained on {', '.join(devices)}."
    if bench.settings.threads != 1:
        return f"worker processes have one thread each, and --threads {bench.settings.threads} was asked for."
    return ""


def worker_count(bench: Workbench, clients: int, wanted: str | None = None) -> int:
    """How many processes the settings ask for, or are wanted; no more than there are clients."""
    wanted = bench.settings.workers if wanted is None else wanted
    if wanted != "auto":
        return min(int(wanted), clients) if int(wanted) > 1 and clients > 1 else 1
    if why_impossible(bench):
        return 1
    return min(len(os.sched_getaffinity(0)), clients)
