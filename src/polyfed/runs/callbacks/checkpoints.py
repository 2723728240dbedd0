"""Checkpoints of a run while it trains. A run with a folder survives being killed at any instant.

A checkpoint is taken between two rounds and written in the background while the next one trains. At most one is pending; whatever
ends the run waits for it. Every background task has a thread of its own, which ends with it. No thread waits between tasks, so a process
forked in between lacks none.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from polyfed.core.method import Method
from polyfed.core.slots import SLOTS
from polyfed.core.workbench import ClientState
from polyfed.errors import RunFolderError
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.costs import LEFT_BEHIND
from polyfed.runs.folder.left_files import leave_newcomer, write_answers

if TYPE_CHECKING:
    from polyfed.runs.callbacks.active_run import ActiveRun
    from polyfed.runs.callbacks.selection import BestValidation
    from polyfed.runs.result import Result

log = logging.getLogger("polyfed")


@dataclasses.dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written: of which round, and what the backend must know when that succeeds, or fails."""

    round: int
    changed: set[str]
    marks: Mapping[str, ClientState]


class CheckpointWriter(Callback):
    """Write a checkpoint after the setup, when one is due, and at the end. It runs after what writes metrics, whose size it records."""

    def __init__(self, run: ActiveRun, selection: BestValidation | None = None) -> None:
        self.run, self.experiment, self.folder, self.selection = run, run.experiment, run.folder, selection
        self.last_saved = time.monotonic()
        self.background = BackgroundTask()
        self.pending: PendingCheckpoint | None = None
        self.saved = self.complete = -1
        self.copied_bytes = 0

    def after_round(self, run: RunState) -> None:
        if self.folder is not None and self._is_due(run.round, run.settings.checkpoint_every):
            self.save()
        self.complete = run.round

    def end(self, result: Result) -> None:
        if self.folder is not None:
            leave_newcomer(self.experiment, self.folder.path)
            write_answers(self.folder.path, self.run.answers)
            self.save(at_once=True, finished=True)

    def _is_due(self, number: int, every: str) -> bool:
        """The state before round 1 is always saved. A time limit is no reason to wait for the pending checkpoint."""
        if number and every.endswith("s"):
            return not self.background.busy and time.monotonic() - self.last_saved >= float(every[:-1])
        return number == 0 or number % int(every) == 0

    @property
    def leaves_memory_alone(self) -> bool:
        """True if the pending checkpoint does not hold copies that would count as memory of training."""
        return not self.background.busy or self.copied_bytes < LEFT_BEHIND

    def collect(self) -> None:
        """Conclude the pending checkpoint if it is written. The first is waited for: metrics without a checkpoint show that one was lost."""
        if not self.background.busy or self.saved < 0:
            self.conclude()

    def save_if_between_rounds(self) -> None:
        """After a failure: a round that was cut off must be repeated from its start, so only a state between rounds is worth saving."""
        self.settle()
        if self.folder is None or self.experiment.server.round != self.complete or self.complete == self.saved:
            return
        try:
            self.save(at_once=True)
        except RunFolderError as error:
            log.warning("%s", error)

    def settle(self) -> None:
        """After a failure: wait for the pending checkpoint. That the run failed is worse than that this did too."""
        try:
            self.conclude()
        except RunFolderError as error:
            log.warning("%s", error)

    def conclude(self) -> None:
        """Wait for the pending checkpoint; if it could not be written, that is raised here."""
        if self.pending is None:
            return
        self.background.wait()
        former, self.pending = self.pending, None
        try:
            self.background.finish()
        except BaseException:
            self.experiment.backend.changed |= former.changed
            raise
        self.written(former)

    def written(self, checkpoint: PendingCheckpoint) -> None:
        """Note that a checkpoint can be gone back to."""
        self.saved = checkpoint.round
        self.experiment.backend.retain("checkpoint", checkpoint.marks)

    def save(self, at_once: bool = False, finished: bool = False) -> None:
        """Take a checkpoint, to be written while the next round trains, or at once."""
        assert self.folder is not None
        self.conclude()
        backend = self.experiment.backend
        snapshot = self.experiment.snapshot()
        snapshot.notes |= {**self.folder.seals(), "finished": finished}
        if finished and backend.remote:
            snapshot.notes["client_digests"] = backend.client_digests()
        snapshot.notes["best"] = None if self.selection is None else self.selection.notes()
        draft = self.folder.checkpoints.draft(snapshot, backend.changed, finished)
        # Where clients keep their state themselves, what is here are marks of it, small and never changed.
        taken = PendingCheckpoint(snapshot.round, backend.changed, dict(snapshot.clients) if backend.remote else {})
        if at_once:
            self.folder.checkpoints.write_draft(draft)
            backend.changed = set()
            self.written(taken)
        else:
            draft = draft.apart(state_is_replaced=not _changes_server_state(self.experiment.method))
            backend.changed, self.pending = set(), taken
            backend.retain("pending", taken.marks)
            self.copied_bytes = draft.copied_bytes
            self.background.start(functools.partial(self.folder.checkpoints.write_draft, draft))
        self.last_saved = time.monotonic()


def _changes_server_state(method: Method) -> bool:
    """Whether code of the method is given the server. Otherwise only the loop makes new state, and it replaces values."""
    return any(SLOTS[name].given_server for name in method.filled_slots)


class BackgroundTask:
    """One task at a time, in a thread. What goes wrong in it is raised where it is waited for."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0  # of all tasks that have ended
        self.thread: threading.Thread | None = None
        self.done = threading.Event()
        self.done.set()
        self.error: BaseException | None = None
        _all.add(self)

    @property
    def busy(self) -> bool:
        return not self.done.is_set()

    def start(self, work: Callable[[], None]) -> None:
        """Begin a task, when the one before it has ended well."""
        self.finish()
        self.done = done = threading.Event()
        # Not a daemon: a program that ends waits for it.
        thread = threading.Thread(target=self._do, args=(work, done), name="polyfed background", daemon=False)
        try:
            thread.start()
            self.thread = thread
        except RuntimeError:  # the system gives no more threads: the work is done all the same
            done.set()
            self._do_here(work)

    def wait(self) -> None:
        """Wait for the end of the work; an interrupt of the waiting leaves it going on."""
        if threading.current_thread() is self.thread:
            return
        # An interrupted join takes the thread for ended (Python 3.11), so that the event is what is waited for.
        self.done.wait()
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.join()

    def finish(self) -> None:
        """Wait for the end of the work, and raise what went wrong in it."""
        self.wait()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _do(self, work: Callable[[], None], done: threading.Event) -> None:
        _leave_signals_to_others()
        began = time.thread_time()
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self.cpu_seconds += time.thread_time() - began
            done.set()

    def _do_here(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.error = error


def _leave_signals_to_others() -> None:
    """An interrupt must reach the main thread: only there does Python act on it."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})


_all: weakref.WeakSet[BackgroundTask] = weakref.WeakSet()


def _wait_for_all() -> None:
    """Before a fork: the child would have what the threads hold (locks, half-written buffers), but not the threads."""
    for task in list(_all):
        task.wait()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_all)
