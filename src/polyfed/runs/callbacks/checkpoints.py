"""Checkpoints during training. A run with a folder survives being killed at any time.

A checkpoint is taken between two rounds and written in the background while the next round trains. At most one is pending, and the run
waits for it before it ends. Every background task has its own thread, which ends with the task. No thread waits between tasks, so a
fork between two tasks loses no thread.
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

from polyfed.core.slots import SLOTS
from polyfed.core.workbench import ClientState
from polyfed.errors import RunFolderError
from polyfed.runs.callbacks.callback import ActiveRun, Callback, RunState
from polyfed.runs.costs import LEFT_BEHIND
from polyfed.runs.folder.final_files import save_newcomer, write_answers

if TYPE_CHECKING:
    from polyfed.runs.callbacks.evaluation import BestValidation
    from polyfed.runs.result import Result

log = logging.getLogger("polyfed")


@dataclasses.dataclass(frozen=True)
class PendingCheckpoint:
    """A checkpoint that is being written: its round, and what the backend must know when writing succeeds or fails."""

    round: int
    changed: set[str]
    marks: Mapping[str, ClientState]


class CheckpointWriter(Callback):
    """Write a checkpoint after the setup, when one is due, and at the end. It records the size of the metrics, so it runs after their writers."""

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
            save_newcomer(self.experiment, self.folder.path)
            write_answers(self.folder.path, self.run.answers)
            self.save(at_once=True, finished=True)

    def _is_due(self, number: int, every: str) -> bool:
        """Return True for round 0 and every n rounds, or if the interval in seconds has passed and no checkpoint is pending."""
        if number and every.endswith("s"):
            return not self.background.busy and time.monotonic() - self.last_saved >= float(every[:-1])
        return number == 0 or number % int(every) == 0

    @property
    def leaves_memory_alone(self) -> bool:
        """True if the pending checkpoint holds no copies large enough to distort the measured training memory."""
        return not self.background.busy or self.copied_bytes < LEFT_BEHIND

    def collect(self) -> None:
        """Conclude the pending checkpoint if it is written. Wait for the first, because metrics without a checkpoint look like data loss."""
        if not self.background.busy or self.saved < 0:
            self.conclude()

    def save_if_between_rounds(self) -> None:
        """Save the state after a failure, unless it happened within a round, which must be repeated from its start."""
        self.settle()
        if self.folder is None or self.experiment.server.round != self.complete or self.complete == self.saved:
            return
        try:
            self.save(at_once=True)
        except RunFolderError as error:
            log.warning("%s", error)

    def settle(self) -> None:
        """Wait for the pending checkpoint after a failure, and only log its error, so that it does not hide the first one."""
        try:
            self.conclude()
        except RunFolderError as error:
            log.warning("%s", error)

    def conclude(self) -> None:
        """Wait for the pending checkpoint, and raise its error if it could not be written."""
        if self.pending is None:
            return
        self.background.wait()
        written, self.pending = self.pending, None
        try:
            self.background.finish()
        except BaseException:
            self.experiment.backend.changed |= written.changed
            raise
        self._confirm(written)

    def _confirm(self, checkpoint: PendingCheckpoint) -> None:
        self.saved = checkpoint.round
        self.experiment.backend.retain("checkpoint", checkpoint.marks)

    def save(self, at_once: bool = False, finished: bool = False) -> None:
        """Take a checkpoint, and write it while the next round trains, or immediately."""
        assert self.folder is not None
        self.conclude()
        backend = self.experiment.backend
        snapshot = self.experiment.snapshot()
        snapshot.notes |= {**self.folder.seals(), "finished": finished}
        if finished and backend.remote:
            snapshot.notes["client_digests"] = backend.client_digests()
        snapshot.notes["best"] = None if self.selection is None else self.selection.notes()
        draft = self.folder.checkpoints.draft(snapshot, backend.changed, finished)
        # Remote clients keep their state themselves; the server has only small marks, which never change.
        taken = PendingCheckpoint(snapshot.round, backend.changed, dict(snapshot.clients) if backend.remote else {})
        if at_once:
            self.folder.checkpoints.write_draft(draft)
            backend.changed = set()
            self._confirm(taken)
        else:
            # Only slots that receive the server can change its state in place; the loop replaces values.
            changes_state = any(SLOTS[name].given_server for name in self.experiment.method.filled_slots)
            draft = draft.detached(state_is_replaced=not changes_state)
            backend.changed, self.pending = set(), taken
            backend.retain("pending", taken.marks)
            self.copied_bytes = draft.copied_bytes
            self.background.start(functools.partial(self.folder.checkpoints.write_draft, draft))
        self.last_saved = time.monotonic()


class BackgroundTask:
    """Runs one task at a time in a thread. An error in the task is raised by the method that waits for it."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0  # of all finished tasks
        self.thread: threading.Thread | None = None
        self.done = threading.Event()
        self.done.set()
        self.error: BaseException | None = None
        _all.add(self)

    @property
    def busy(self) -> bool:
        return not self.done.is_set()

    def start(self, work: Callable[[], None]) -> None:
        """Start a task after the previous one; raise the error of the previous one, if any."""
        self.finish()
        self.done = done = threading.Event()
        # Not a daemon, so that the program waits for it before it exits.
        thread = threading.Thread(target=self._do, args=(work, done), name="polyfed background", daemon=False)
        try:
            thread.start()
            self.thread = thread
        except RuntimeError:  # the system has no more threads
            done.set()
            try:
                work()
            except Exception as error:
                self.error = error

    def wait(self) -> None:
        """Wait for the task; an interrupt ends the waiting, not the task."""
        if threading.current_thread() is self.thread:
            return
        # After an interrupted join, Python 3.11 considers the thread finished, so wait for the event.
        self.done.wait()
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.join()

    def finish(self) -> None:
        """Wait for the task, and raise its error, if any."""
        self.wait()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _do(self, work: Callable[[], None], done: threading.Event) -> None:
        if hasattr(signal, "pthread_sigmask"):  # interrupts must reach the main thread, the only one that handles them
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        start = time.thread_time()
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self.cpu_seconds += time.thread_time() - start
            done.set()


_all: weakref.WeakSet[BackgroundTask] = weakref.WeakSet()


def _wait_for_all() -> None:
    """Wait before a fork: the child would inherit locks and partial buffers of the threads, but not the threads."""
    for task in list(_all):
        task.wait()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_all)
