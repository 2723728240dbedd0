"""The file ``lock`` in a run folder, which ensures that only one process trains a run. It contains the process id.

The kernel releases the lock when the process ends, so a file left by a killed process locks nothing. Systems and file systems without
such locks (Windows, some network folders) never reject a process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from polyfed.errors import RunFolderError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE = "lock"
MAX_HOLDER = 200
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_held: set[int] = set()

Value = TypeVar("Value")


class RunIsBusy(RunFolderError):
    """Another process is training the run.

    Attributes:
        folder: The run folder.
        holder: The process that is training it.
        elsewhere: False if it is this process, so that waiting would never end.
    """

    def __init__(self, folder: Path, holder: str, elsewhere: bool) -> None:
        super().__init__(
            f"{holder} is training {folder}. Wait until it has finished "
            f"(polyfed resume {folder} then reads or resumes the run), or choose another --out."
        )
        self.folder, self.holder, self.elsewhere = folder, holder, elsewhere


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the block.

    Raises:
        RunIsBusy: If another process holds it.
    """
    path = folder / FILE
    descriptor = None if fcntl is None else _acquire(path)
    if descriptor is None:
        yield
        return
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # in a forked child the lock belongs to the parent
            _held.remove(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _acquire(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None if locks are not supported."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        acquired = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()} on {platform.node() or 'this machine'}"[:MAX_HOLDER].encode())
                acquired = True
                return descriptor
        except BlockingIOError as error:
            holder = os.read(descriptor, MAX_HOLDER).decode(errors="replace")
            status = os.fstat(descriptor)
            elsewhere = not any(os.path.samestat(os.fstat(held), status) for held in _held)
            raise RunIsBusy(path.parent, f"Process {holder}" if holder else "Another process", elsewhere) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            path.unlink()
            return None
        finally:
            if not acquired:
                os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return False if the previous holder has removed the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def is_held(folder: Path) -> bool:
    return _is_refused(folder, wait=False)


def _is_refused(folder: Path, wait: bool) -> bool:
    """Take a shared lock for an instant, and return True if it was refused; with ``wait``, the kernel waits until it is free."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY)
    except OSError:
        return False  # not locked, or locks are not supported
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
    return False


def retry_when_free(work: Callable[[], Value], notify: Callable[[str], None]) -> Value:
    """Return the result of ``work``; while another process trains the run, wait and try again."""
    while True:
        try:
            return work()
        except RunIsBusy as busy:
            if not busy.elsewhere:
                raise
            notify(f"{busy.holder} is training {busy.folder}; waiting for it to finish.")
            _is_refused(busy.folder, wait=True)


def _release_in_child() -> None:
    """Close the locks in a forked child, because a lock is held until all processes that have it open close it."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
