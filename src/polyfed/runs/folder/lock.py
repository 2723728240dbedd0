"""One process at a time trains a run: it holds the file ``lock`` in the run folder, in which its number stands.

The lock is the kernel's, which lets go of it when the process ends, however it ends; a file that a killed one left behind locks
nothing. Where a system or a file system has no such locks (Windows, some network folders), nobody is refused.
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
LONGEST_NAME = 200
HAVING_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_held: set[int] = set()

Done = TypeVar("Done")


class BeingTrained(RunFolderError):
    """A run that another process trains just now.

    Attributes:
        folder: the run folder.
        holder: who trains it, in words.
        elsewhere: whether that is another process than this one, so that its end can be waited for.
    """

    def __init__(self, folder: Path, holder: str, elsewhere: bool) -> None:
        super().__init__(
            f"{folder} is being trained by {holder}. Wait for its end "
            f"(then polyfed resume {folder} reads it, or goes on), or choose another --out."
        )
        self.folder, self.holder, self.elsewhere = folder, holder, elsewhere


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder inside the block; one that another process holds is an error that names it."""
    path = folder / FILE
    descriptor = None if fcntl is None else _taken(path)
    if descriptor is None:
        yield
        return
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not in a fork that ran on to here: there the lock is the parent's
            _held.remove(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _taken(path: Path) -> int | None:
    """A descriptor that holds the lock; None where there are no locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        taken = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _lies_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()} on {platform.node() or 'this machine'}"[:LONGEST_NAME].encode())
                taken = True
                return descriptor
        except BlockingIOError as error:
            raise _refusal(descriptor, path.parent) from error
        except OSError as error:
            if error.errno not in HAVING_NO_LOCKS:
                raise
            path.unlink()
            return None
        finally:
            if not taken:
                os.close(descriptor)


def _lies_at(descriptor: int, path: Path) -> bool:
    """Whether the file is still there: the one that held it before removes it at its end."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _refusal(descriptor: int, folder: Path) -> BeingTrained:
    holder = os.read(descriptor, LONGEST_NAME).decode(errors="replace")
    status = os.fstat(descriptor)
    elsewhere = not any(os.path.samestat(os.fstat(own), status) for own in _held)
    return BeingTrained(folder, f"process {holder}" if holder else "another process", elsewhere)


def is_held(folder: Path) -> bool:
    return _shared(folder, wait=False)


def _shared(folder: Path, wait: bool) -> bool:
    """Hold the lock together with all who only look, for an instant; says whether that was refused. The kernel ends the waiting."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY)
    except OSError:
        return False  # also where there are no locks: nobody writes the file there
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in HAVING_NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return False


def once_free(work: Callable[[], Done], notify: Callable[[str], None]) -> Done:
    """What the work gives back; as often as another process trains the run, its end is waited for."""
    while True:
        try:
            return work()
        except BeingTrained as busy:
            if not busy.elsewhere:
                raise
            notify(f"{busy.folder} is being trained by {busy.holder}; its end is waited for.")
            _shared(busy.folder, wait=True)


def _leave_to_parent() -> None:
    """In a forked child: a lock is held as long as any process has it open, and this one must not outlive the parent."""
    while _held:
        with contextlib.suppress(OSError):
            os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
