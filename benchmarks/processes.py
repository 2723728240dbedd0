"""Process trees in Linux's /proc: members, memory, CPU time, and suspending them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")
PARENT, USER_TIME, SYSTEM_TIME = 1, 11, 12
"""Positions in /proc/<pid>/stat, counted from the state, which follows the name in brackets."""


def fields_of(pid: int) -> list[str] | None:
    """Return the fields of a process after its name; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def tree(root: int) -> list[int]:
    """Return a process and all its descendants."""
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
    """Return the total resident memory of some processes. Shared pages count once per process."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total


def processor_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of some processes."""
    found = [fields for pid in pids if (fields := fields_of(pid)) is not None]
    return sum(int(fields[USER_TIME]) + int(fields[SYSTEM_TIME]) for fields in found) / TICK


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class PeakMemory:
    """Samples a tree's memory a few times per second inside the block, and stores the peak; if unwatched, only at the end."""

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


class ProcessorTime:
    """CPU time of all processes whose environment contains a mark, sampled a few times per second.

    It says what a side costs where others keep the machine busy. Of a process that ends, what it used since the last look is missing.
    """

    def __init__(self, mark: str, every: float = 0.2) -> None:
        self.mark, self.every = mark.encode(), every
        self.used: dict[int, float] = {}
        self.totals: list[tuple[float, float]] = []
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)

    def watch(self) -> None:
        while not self.over.wait(self.every):
            self.look()

    def look(self) -> None:
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (folder / "environ").read_bytes():
                    fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                    self.used[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.totals.append((time.monotonic(), sum(self.used.values())))

    def __enter__(self) -> ProcessorTime:
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.watcher.join()

    def at(self, moment: float) -> float:
        """Return the seconds used until a moment."""
        return next((used for when, used in self.totals if when >= moment), self.totals[-1][1])
