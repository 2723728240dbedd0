"""Work done in the background, one task at a time: how a checkpoint is written while the next round trains.

Every task has a thread of its own, which ends with it. No thread waits between tasks, so a process forked in between lacks none.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable


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
        """Whether a task is running."""
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
