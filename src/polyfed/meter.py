"""What training costs the machine: seconds, CPU seconds and peak memory of this process, without the evaluations between rounds."""

from __future__ import annotations

import ctypes
import functools
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from polyfed.ledger import Ledger
from polyfed.settings import Settings

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
LEFT_BEHIND = 2**20
"""Evaluations may leave this much freed memory with the process before it is worth giving back."""


class Meter:
    """Runs while a run trains, and stands still while it is evaluated or saved.

    Memory is the highest resident size (Linux; elsewhere it is not measured) and how far that lies above the size before training.
    CPU seconds and memory are those of this process: where clients are trained by others, ``alone`` is False and neither is measured.
    ``beside`` tells the CPU seconds of what other threads do meanwhile (checkpoints), which are no part of training.
    """

    def __init__(self, alone: bool = True, beside: Callable[[], float] = float) -> None:
        self.alone, self.beside = alone, beside
        if alone:
            load_libraries()
            gc.collect()
            give_back()
        self.before = resident_size() if alone else None
        self.at_pause = self.before
        self._set_marks()

    def pause(self, ledger: Ledger) -> None:
        """Add what was spent since the last start."""
        # A run begun where CPU seconds were not counted would tell those of its last rounds only.
        from_the_start = "training" in ledger.cpu_seconds or "training" not in ledger.seconds
        ledger.seconds["training"] = ledger.seconds.get("training", 0.0) + time.perf_counter() - self.wall
        if self.alone and from_the_start:
            ledger.cpu_seconds["training"] = ledger.cpu_seconds.get("training", 0.0) + self._cpu_seconds() - self.cpu
        peak = peak_size() if self.peak_is_new else None
        if peak is not None and self.before is not None:
            found = {"peak": peak, "increase": peak - self.before}
            ledger.memory = {what: max(size, ledger.memory.get(what, 0)) for what, size in found.items()}
            self.at_pause = resident_size()

    def go_on(self, measure_memory: bool = True) -> None:
        """Start again; what happened in between counts for nothing, nor does the memory it left behind, or still holds."""
        now = resident_size()
        if now is not None and self.at_pause is not None and now > self.at_pause + LEFT_BEHIND:
            give_back()
        self._set_marks(measure_memory)

    def _cpu_seconds(self) -> float:
        return time.process_time() - self.beside()

    def _set_marks(self, measure_memory: bool = True) -> None:
        self.peak_is_new = measure_memory and self.before is not None and forget_peak()
        self.wall, self.cpu = time.perf_counter(), self._cpu_seconds()


def trains_alone(settings: Settings) -> bool:
    """Whether this process trains all clients itself."""
    return settings.workers == "1" and settings.deliver != "flower"


def resident_size() -> int | None:
    """Bytes of memory this process holds now; None where the system does not tell."""
    return _status("VmRSS:")


def peak_size() -> int | None:
    """The most bytes of memory this process held since the last ``forget_peak``; None where the system does not tell."""
    return _status("VmHWM:")


def forget_peak() -> bool:
    """Let the peak begin anew from the present size; whether the system can."""
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


def give_back() -> None:
    """Return freed memory to the system, so that a run is not charged for, nor lives on, what another one left."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if STATUS.exists() else None
    if trim is not None:
        trim(0)
