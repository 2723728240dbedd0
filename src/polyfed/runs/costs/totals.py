"""What a run costs: bytes by direction, purpose and class of entry; messages; seconds; memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyfed.core.conversation import TRAINING, Ask, AskClients, Payload, Replies
from polyfed.core.entries import Entry
from polyfed.core.trees import leaves_in

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
        """Bytes in one direction for one purpose."""
        return sum(self.bytes[direction].get(purpose, {}).values())

    def left_clients(self) -> tuple[int | None, int | None]:
        """Bytes that left clients in training and are no model entries: once, before round 1, and in the rounds; None: not known apart."""
        total = self.bytes["up"].get(TRAINING, {}).get(EXTRA, 0)
        return self.once, None if self.once is None else total - self.once

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """Add the seconds spent in the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start

    def numbers(self) -> dict[str, Any]:
        """Everything as plain numbers."""
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


def counted(ask_clients: AskClients, costs: Costs, kinds: Mapping[str, Entry]) -> AskClients:
    """A backend whose traffic is counted."""

    def count(ask: Ask) -> Replies:
        times = Counter(map(id, ask.payloads.values()))
        for payload in {id(payload): payload for payload in ask.payloads.values()}.values():
            costs.note("down", ask.purpose, payload, kinds, times=times[id(payload)])
        costs.messages[ask.purpose] = costs.messages.get(ask.purpose, 0) + len(ask.payloads)
        for reply in ask_clients(ask):
            costs.note("up", ask.purpose, reply.payload, kinds, ask.round)
            yield reply

    return count
