"""Decide when starting worker processes pays off: the CPU time of past requests predicts that of the remaining ones."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Collection, Iterable, Iterator

from polyfed.backends.base import Outcome
from polyfed.backends.process_memory import available_memory, peak_size
from polyfed.backends.worker import is_worker
from polyfed.core.data_types import ClientData, DatasetExamples, Examples
from polyfed.core.rounds import TRAINING, Request
from polyfed.core.workbench import Workbench

SECONDS_REPAID = 3.0
"""Workers start if the remaining work takes more CPU seconds than this in one process."""
SECONDS_SENT = 3e-3
"""Workers do not start for shorter tasks: sending a task of 2 ms to a worker costs as much CPU time as a second process saves."""


class Pace:
    """CPU seconds of the requests in this process. The first task is a warm-up and does not count."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.round = rounds, 0
        self.this_round = self.last_round = 0.0
        self.measured: dict[str, list[float]] = {}
        """Number of tasks and their seconds, by kind of request."""
        self.warm = False

    def begin(self, request: Request) -> None:
        self.training = request.purpose == TRAINING and request.round > 0
        if self.training and request.round != self.round:
            self.last_round, self.this_round, self.round = self.this_round, 0.0, request.round
        self.tasks = self.measured.setdefault(request.what, [0, 0.0])

    def timed(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Compute the outcomes of one task, measure it, and yield them."""
        start = time.thread_time()
        found = list(outcomes)
        if self.warm:
            seconds = time.thread_time() - start
            self.tasks[:] = self.tasks[0] + 1, self.tasks[1] + seconds
            self.this_round += seconds if self.training else 0.0
        self.warm = True
        yield from found

    def repays_workers(self, tasks: int) -> bool:
        """Return True if these tasks and, in training, all later rounds are predicted to take long enough."""
        measured, total = self.tasks
        each = total / max(measured, 1)
        seconds = tasks * each
        if self.training:
            seconds += (self.rounds - self.round) * max(self.last_round, self.this_round + seconds)
        return measured > 0 and each >= SECONDS_SENT and seconds >= SECONDS_REPAID


def free_processes() -> int:
    """Return how many processes, including this one, can run at full speed and fit in memory."""
    load = os.getloadavg()[0]  # average of the last minute, including this process
    cores = min(len(os.sched_getaffinity(0)), round((os.cpu_count() or 1) - load + 1))
    available, size = available_memory(), peak_size()  # a worker needs at most as much memory as this process
    return min(cores, available // size) if available is not None and size else cores


def needs_this_process(bench: Workbench, clients: Collection[ClientData]) -> bool:
    """Return True if worker processes might change the results, or if this process is itself one of many.

    Objects given in Python may have state, and torch data sets may read from a file that all processes would share.
    """
    if bench.uses_objects or is_worker() or multiprocessing.parent_process() is not None:
        return True
    return any(isinstance(part, DatasetExamples) for client in clients for part in _parts(client))


def _parts(client: ClientData) -> Iterator[Examples | None]:
    yield client.train
    yield client.validation
    yield from client.tests.values()
