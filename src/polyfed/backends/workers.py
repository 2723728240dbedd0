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
from collections.abc import Collection, Generator, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from polyfed.backends.base import Outcome, StagingBackend, Usage
from polyfed.backends.client_store import ClientStore
from polyfed.backends.in_process import InProcess
from polyfed.backends.pace import Pace, free_processes, needs_this_process
from polyfed.backends.sending import Bundle, Sending, WorkerTask
from polyfed.backends.shared_memory import SharedMemory
from polyfed.backends.worker import Worker, show
from polyfed.core.data_types import ClientData
from polyfed.core.rounds import Request
from polyfed.core.workbench import Workbench
from polyfed.errors import ClientFailure, SettingError
from polyfed.settings import AUTO

log = logging.getLogger("polyfed")

MAX_DEATHS = 3
MAX_BYTES_AHEAD = 1 << 30


class Workers(StagingBackend):
    """Processes with one thread each, forked at the first request, or with ``auto`` as soon as starting them pays off.

    Until then, clients run in this process. States and replies are the same in both, so the digest does not depend on the time of the switch.
    Each worker has a separate backend of class ``base``, which runs one client at a time, or groups if it takes groups.
    A worker that dies is replaced, and its task is repeated. With ``auto``, a run continues in this process if workers cannot be started, or
    if the system kills several that run the same task.
    """

    def __init__(self, bench: Workbench, clients: Collection[ClientData], base: type[InProcess], count: int) -> None:
        if reason := workers_problem(bench):
            raise SettingError(f"--workers {bench.settings.workers}: {reason} Use --workers 1.")
        self.inner = base(bench, clients)
        super().__init__(bench, clients)
        self.count = count
        self.pace = Pace(bench.settings.rounds) if bench.settings.workers == AUTO else None
        self.started = self.pace is None
        self.cpu_seconds = 0.0
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
        tasks = self.tasks(request, clients)
        if self.pace is not None:
            tasks = yield from self.outcomes_here(self.pace, request, tasks)
        if not tasks:
            return
        clients = [client for task in tasks for client in task.clients]
        if self.memory is None:
            self.memory = SharedMemory()
        states = {client: self.current_state(client) for client in clients}
        sending = Sending(self.serial, request, clients, states, self.memory, self.bench.answers is not None)
        turn = Turn(self, sending, tasks)
        try:
            for task, bundle in zip(tasks, turn.bundles(), strict=True):
                for note in bundle.notes:
                    show(note, self.shown)
                if self.bench.answers is not None:
                    self.bench.answers.update(bundle.answers)
                yield from bundle.outcomes
                if bundle.killed:
                    self.inner.share_states(self)
                    yield from self.inner.outcomes(request, task.clients)
                if bundle.error is not None:
                    raise bundle.error
        finally:
            if self.serial == sending.serial:
                self.end(list(self.running if self.started else self.workers))

    def outcomes_here(self, pace: Pace, request: Request, tasks: list[WorkerTask]) -> Generator[Outcome, None, list[WorkerTask]]:
        """Run tasks in this process until starting workers pays off. Return the other tasks, for workers."""
        pace.begin(request)
        self.inner.share_states(self)
        for number, task in enumerate(tasks):
            self.started = self.started or self.workers_repay(pace, len(tasks) - number, request)
            if self.started and len(tasks) > 1:
                return [WorkerTask(place, left.clients) for place, left in enumerate(tasks[number:])]
            yield from pace.timed(self.inner.outcomes(request, task.clients))
        return []

    def workers_repay(self, pace: Pace, tasks: int, request: Request) -> bool:
        """Return True if starting workers pays off for the remaining work, and is safe."""
        if tasks < 2 or not pace.repays_workers(tasks) or needs_this_process(self.bench, self.data.values()):
            return False
        count = min(self.count, free_processes())
        if count < 2:
            return False
        self.count = count
        if not self.start_first():
            return False
        log.info(
            "Round %d: from now on in %d processes, with the same results. Use --workers 1 for one.", request.round, self.count
        )
        return True

    def start_first(self) -> bool:
        """Start a worker; return False, and stay in this process from now on, if the system does not permit it."""
        self.inner.client_states, self.inner.staged = {}, ClientStore()  # the worker needs none of these states
        try:
            self.memory = self.memory or SharedMemory()
            self.workers.append(Worker(self.inner, self.memory))
        except OSError as error:
            self.stay_here(f"cannot start worker processes ({error.strerror})")
            self.inner.share_states(self)
            return False
        return True

    def stay_here(self, reason: str) -> None:
        log.warning("Continuing in one process: %s.", reason)
        self.count, self.started = 1, False

    @property
    def workers_usage(self) -> Usage:
        return Usage(self.cpu_seconds, sum(worker.memory for worker in self.workers))

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
        if len(self.workers) >= self.count:
            return None
        assert self.memory is not None
        try:
            self.workers.append(Worker(self.inner, self.memory))
        except OSError as error:
            if self.pace is not None and self.workers:
                self.count = len(self.workers)
                return None
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
        self.started = self.pace is None
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
            self.backend.cpu_seconds += response["cpu_seconds"]
            worker.memory = max(worker.memory, response["memory"])
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
        if self.backend.pace is not None and how.endswith("SIGKILL"):
            self.backend.stay_here("the system killed workers, probably because memory ran out")
            self.settle(task, Bundle(killed=True))
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
    """Return the number of worker processes for ``workers`` (default: the setting), at most one per client.

    With ``auto``, at most one per client that trains in a round, and one if the number of processes would change the result: the groups of
    stacked clients and the compiled programs depend on it.
    """
    settings = bench.settings
    workers = settings.workers if workers is None else workers
    if workers != AUTO:
        return min(int(workers), clients) if int(workers) > 1 and clients > 1 else 1
    if workers_problem(bench) or settings.backend != "process" or settings.compile != "off":
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), settings.sampled(clients)))
