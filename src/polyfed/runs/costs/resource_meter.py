"""What training costs the machine: seconds, CPU seconds and peak memory of this process, without the evaluations between rounds."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from polyfed.core.freed_memory import give_back
from polyfed.runs.costs.totals import Costs
from polyfed.settings import Settings

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
LEFT_BEHIND = 2**20
"""Freed memory that evaluations may leave with the process before it is worth returning to the system."""


class Meter:
    """Measures while a run trains, and is paused while it is evaluated or saved.

    Memory is the highest resident size (Linux; elsewhere it is not measured) and how far that lies above the size before training.
    CPU seconds and memory are those of this process: where clients are trained by others, ``trains_here`` is False and neither is measured.
    ``background`` returns the CPU seconds of what other threads do meanwhile (checkpoints), which are no part of training.
    """

    def __init__(self, trains_here: bool = True, background: Callable[[], float] = float) -> None:
        self.trains_here, self.background = trains_here, background
        if trains_here:
            load_libraries()
            gc.collect()
            give_back()
        self.before = resident_size() if trains_here else None
        self.at_pause = self.before
        self._set_marks()

    def pause(self, costs: Costs) -> None:
        """Add what was spent since the last start."""
        # A run begun where CPU seconds were not counted would report those of its last rounds only.
        from_the_start = "training" in costs.cpu_seconds or "training" not in costs.seconds
        costs.seconds["training"] = costs.seconds.get("training", 0.0) + time.perf_counter() - self.wall
        if self.trains_here and from_the_start:
            costs.cpu_seconds["training"] = costs.cpu_seconds.get("training", 0.0) + self._cpu_seconds() - self.cpu
        peak = peak_size() if self.peak_is_new else None
        if peak is not None and self.before is not None:
            found = {"peak": peak, "increase": peak - self.before}
            costs.memory = {what: max(size, costs.memory.get(what, 0)) for what, size in found.items()}
            self.at_pause = resident_size()

    def go_on(self, measure_memory: bool = True) -> None:
        """Start again; what happened in between does not count, nor does the memory it left behind or still uses."""
        now = resident_size()
        if now is not None and self.at_pause is not None and now > self.at_pause + LEFT_BEHIND:
            give_back()
        self._set_marks(measure_memory)

    def _cpu_seconds(self) -> float:
        return time.process_time() - self.background()

    def _set_marks(self, measure_memory: bool = True) -> None:
        self.peak_is_new = measure_memory and self.before is not None and forget_peak()
        self.wall, self.cpu = time.perf_counter(), self._cpu_seconds()


def trains_in_this_process(settings: Settings) -> bool:
    """Whether this process trains all clients itself."""
    return settings.workers == "1" and settings.backend != "flower"


def resident_size() -> int | None:
    """Bytes of memory this process uses now; None where the system does not report it."""
    return _status("VmRSS:")


def peak_size() -> int | None:
    """The most bytes of memory this process used since the last ``forget_peak``; None where the system does not report it."""
    return _status("VmHWM:")


def forget_peak() -> bool:
    """Reset the peak to the current size; returns whether the system can."""
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _status(what: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(what)), None)


@functools.cache
def load_libraries() -> None:
    """Take one training step of next to nothing: what torch loads at its first step is no cost of the first method that is measured."""
    with torch.random.fork_rng(devices=[]):
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 2)
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        nn.functional.cross_entropy(net(torch.zeros(4, 3, 8, 8)), torch.zeros(4, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
