"""Process trees as Linux shows them in /proc: who belongs to one, its memory, its processor time, and putting it to sleep."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")
PARENT, USER_TIME, SYSTEM_TIME = 1, 11, 12
"""Positions in /proc/<pid>/stat, counted from the state, which follows the name in brackets."""


def fields_of(pid: int) -> list[str] | None:
    """The fields of a process after its name, or None when it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := fields_of(int(entry))) is not None:
            children.setdefault(int(fields[PARENT]), []).append(int(entry))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """The sum of the resident memory of some processes; pages they share count once for each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total


def processor_seconds(pids: Iterable[int]) -> float:
    """Processor time used by some processes so far."""
    found = [fields for pid in pids if (fields := fields_of(pid)) is not None]
    return sum(int(fields[USER_TIME]) + int(fields[SYSTEM_TIME]) for fields in found) / TICK


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class PeakMemory:
    """Looks at a tree's memory a few times a second while the block runs, and keeps the most it saw; unwatched, only at its end."""

    def __init__(self, root: int, watched: bool = True, every: float = 0.25) -> None:
        self.root, self.watched, self.every, self.most = root, watched, every, 0
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)

    def look(self) -> None:
        self.most = max(self.most, resident_bytes(tree(self.root)))

    def watch(self) -> None:
        while not self.over.wait(self.every):
            self.look()

    def __enter__(self) -> PeakMemory:
        if self.watched:
            self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.watched:
            self.watcher.join()
        self.look()
