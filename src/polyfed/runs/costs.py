"""What a run costs: bytes, messages, and of this process seconds, CPU seconds and memory of training, without evaluations."""

from __future__ import annotations

import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.entries import Entry
from polyfed.core.rounds import TRAINING, Payload, Replies, Request, SendRequest
from polyfed.core.workbench import give_back
from polyfed.settings import Settings
from polyfed.trees import leaves_in

EXTRA = "extra"


@dataclass
class Costs:
    """Running totals.

    Attributes:
        bytes: direction, purpose and class of entry to a count; the class ``extra`` is what is no model entry.
        messages: purpose to a count of questions to one client.
        seconds: on the clock, for training and evaluation.
        cpu_seconds: of this process, over all its threads, for training; empty where clients are trained by other processes.
        memory: ``peak``: the most bytes this process used while it trained; ``increase``: how far that lies above what it used before.
            Empty where it was not measured.
        once: bytes of ``extra`` that went up in training before round 1, all clients together; None where only the sum with those of
            the rounds is known (runs from before this was counted).
    """

    bytes: dict[str, dict[str, dict[str, int]]] = field(default_factory=lambda: {"up": {}, "down": {}})
    messages: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    once: int | None = 0

    def note(
        self, direction: str, purpose: str, payload: Payload, kinds: Mapping[str, Entry], when: int | None = None, times: int = 1
    ) -> None:
        """Add a payload that was sent once, or to several clients; ``when`` is the round it belongs to, 0 before the first."""
        classes = self.bytes[direction].setdefault(purpose, {})
        extra = times * size_of(payload.extras)
        for name, value in payload.entries.items():
            size = times * value.numel() * value.element_size()
            if name in kinds:
                classes[kinds[name].kind] = classes.get(kinds[name].kind, 0) + size
            else:
                extra += size
        if extra:
            classes[EXTRA] = classes.get(EXTRA, 0) + extra
        if self.once is not None and (direction, purpose, when) == ("up", TRAINING, 0):
            self.once += extra

    def total(self, direction: str, purpose: str = TRAINING) -> int:
        return sum(self.bytes[direction].get(purpose, {}).values())

    def left_clients(self) -> tuple[int | None, int | None]:
        """Bytes that left clients in training and are no model entries: once, before round 1, and in the rounds; None: not known apart."""
        total = self.bytes["up"].get(TRAINING, {}).get(EXTRA, 0)
        return self.once, None if self.once is None else total - self.once

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start

    def numbers(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "messages": self.messages,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "memory": self.memory,
            "once": self.once,
        }

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, Any]) -> Costs:
        """The costs from these numbers, also those of a version that counted less."""
        bytes_ = numbers["bytes"]
        sent_extras = bool(bytes_["up"].get(TRAINING, {}).get(EXTRA, 0))
        return cls(
            bytes_,
            numbers["messages"],
            numbers["seconds"],
            numbers.get("cpu_seconds", {}),
            numbers.get("memory", {}),
            numbers.get("once", None if sent_extras else 0),
        )


def size_of(value: Any) -> int:
    """Bytes of extras: tensors by their values, numbers as 8, text as UTF-8."""
    return sum(map(_leaf_size, leaves_in(value)))


def _leaf_size(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return leaf.numel() * leaf.element_size()
    if isinstance(leaf, str):
        return len(leaf.encode())
    return 0 if leaf is None else 8


def counted(send_request: SendRequest, costs: Costs, kinds: Mapping[str, Entry]) -> SendRequest:
    """A backend whose traffic is counted."""

    def count(request: Request) -> Replies:
        times = Counter(map(id, request.payloads.values()))
        for payload in {id(payload): payload for payload in request.payloads.values()}.values():
            costs.note("down", request.purpose, payload, kinds, times=times[id(payload)])
        costs.messages[request.purpose] = costs.messages.get(request.purpose, 0) + len(request.payloads)
        for reply in send_request(request):
            costs.note("up", request.purpose, reply.payload, kinds, request.round)
            yield reply

    return count


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
