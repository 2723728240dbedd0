"""Costs of a run: bytes, messages, and the time, CPU time and memory that training uses on this machine, without evaluations."""

from __future__ import annotations

import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.backends.base import Usage
from polyfed.backends.process_memory import peak_size, reset_peak, resident_size
from polyfed.core.entries import Entry
from polyfed.core.rounds import TRAINING, Payload, Replies, Request, SendRequest
from polyfed.core.workbench import give_back
from polyfed.trees import leaves_in

EXTRA = "extra"


@dataclass
class Costs:
    """Running totals.

    Attributes:
        bytes: Maps direction, purpose and entry kind to bytes; the kind ``extra`` is everything except model entries.
        messages: Maps the purpose to the number of requests to single clients.
        seconds: Wall-clock time of training and evaluation.
        cpu_seconds: CPU time of training in this process and in worker processes; empty if other machines train the clients.
        memory: ``peak`` bytes that training used, and their ``increase`` over the memory before; empty if not measured. With worker
            processes, this is the peak of this process plus, for each worker, its peak minus its size at its start. The processes may
            reach their peaks at different times.
        once: ``extra`` bytes that all clients uploaded in training before round 1; None for older runs, which recorded only the total.
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
        """Add a payload that was sent ``times`` times; ``when`` is its round, 0 for the setup."""
        by_kind = self.bytes[direction].setdefault(purpose, {})
        extra = times * size_of(payload.extras)
        for name, value in payload.entries.items():
            size = times * value.numel() * value.element_size()
            if name in kinds:
                by_kind[kinds[name].kind] = by_kind.get(kinds[name].kind, 0) + size
            else:
                extra += size
        if extra:
            by_kind[EXTRA] = by_kind.get(EXTRA, 0) + extra
        if self.once is not None and (direction, purpose, when) == ("up", TRAINING, 0):
            self.once += extra

    def total(self, direction: str, purpose: str = TRAINING) -> int:
        return sum(self.bytes[direction].get(purpose, {}).values())

    def left_clients(self) -> tuple[int | None, int | None]:
        """Return the bytes other than model entries that clients uploaded before round 1, and in the rounds; None if not recorded separately."""
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
        return dict(vars(self))

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, Any]) -> Costs:
        """Read the costs from a checkpoint; older versions recorded fewer of them."""
        sent_extras = bool(numbers["bytes"]["up"].get(TRAINING, {}).get(EXTRA, 0))
        return cls(**{"once": None if sent_extras else 0, **numbers})


def size_of(value: Any) -> int:
    """Return the bytes of extras: the values of tensors, 8 for each number, and text as UTF-8."""
    return sum(map(_leaf_size, leaves_in(value)))


def _leaf_size(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return leaf.numel() * leaf.element_size()
    if isinstance(leaf, str):
        return len(leaf.encode())
    return 0 if leaf is None else 8


def counted(send_request: SendRequest, costs: Costs, kinds: Mapping[str, Entry]) -> SendRequest:
    def count(request: Request) -> Replies:
        times = Counter(map(id, request.payloads.values()))
        for payload in {id(payload): payload for payload in request.payloads.values()}.values():
            costs.note("down", request.purpose, payload, kinds, times=times[id(payload)])
        costs.messages[request.purpose] = costs.messages.get(request.purpose, 0) + len(request.payloads)
        for reply in send_request(request):
            costs.note("up", request.purpose, reply.payload, kinds, request.round)
            yield reply

    return count


LEFT_BEHIND = 2**20
"""Bytes of freed memory that evaluations may leave before it is returned to the system."""


class Meter:
    """Measures the costs of training, and pauses during evaluations and checkpoints.

    Memory is the peak resident size, and its increase over the size before training (Linux only).

    Args:
        workers: Returns the usage of worker processes so far; None if other machines train the clients. CPU time and memory are then
            not measured.
        background: Returns the CPU time of background threads (checkpoints), which does not count as training.
    """

    def __init__(self, workers: Callable[[], Usage | None] = Usage, background: Callable[[], float] = float) -> None:
        self.workers, self.background = workers, background
        self.trains_here = workers() is not None
        if self.trains_here:
            load_libraries()
            gc.collect()
            give_back()
        self.before = resident_size() if self.trains_here else None
        self.at_pause = self.before
        self._set_marks()

    def pause(self, costs: Costs) -> None:
        """Add the costs since training started or resumed."""
        # A run that was started without CPU times would report only those of its last rounds.
        from_the_start = "training" in costs.cpu_seconds or "training" not in costs.seconds
        costs.seconds["training"] = costs.seconds.get("training", 0.0) + time.perf_counter() - self.wall
        if self.trains_here and from_the_start:
            costs.cpu_seconds["training"] = costs.cpu_seconds.get("training", 0.0) + self._cpu_seconds() - self.cpu
        peak = peak_size() if self.peak_is_new else None
        if peak is not None and self.before is not None:
            peak += (self.workers() or Usage()).memory
            found = {"peak": peak, "increase": peak - self.before}
            costs.memory = {what: max(size, costs.memory.get(what, 0)) for what, size in found.items()}
            self.at_pause = resident_size()

    def resume(self, measure_memory: bool = True) -> None:
        """Continue to measure, without time and memory used since ``pause``."""
        now = resident_size()
        if now is not None and self.at_pause is not None and now > self.at_pause + LEFT_BEHIND:
            give_back()
        self._set_marks(measure_memory)

    def _cpu_seconds(self) -> float:
        return time.process_time() + (self.workers() or Usage()).cpu_seconds - self.background()

    def _set_marks(self, measure_memory: bool = True) -> None:
        self.peak_is_new = measure_memory and self.before is not None and reset_peak()
        self.wall, self.cpu = time.perf_counter(), self._cpu_seconds()


@functools.cache
def load_libraries() -> None:
    """Take a tiny training step, so that torch loads its libraries before the first method is measured."""
    with torch.random.fork_rng(devices=[]):
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 2)
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        nn.functional.cross_entropy(net(torch.zeros(4, 3, 8, 8)), torch.zeros(4, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
