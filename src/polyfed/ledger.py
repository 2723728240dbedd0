"""What a run costs: bytes by direction, purpose and class of entry; messages; seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polyfed.conversation import TRAINING, Ask, Deliver, Payload, Replies
from polyfed.entries import Entry

EXTRA = "extra"


@dataclass
class Ledger:
    """Running totals. ``bytes`` maps direction, purpose and class to a count."""

    bytes: dict[str, dict[str, dict[str, int]]] = field(default_factory=lambda: {"up": {}, "down": {}})
    messages: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, direction: str, purpose: str, payload: Payload, kinds: Mapping[str, Entry]) -> None:
        """Add one payload."""
        classes = self.bytes[direction].setdefault(purpose, {})
        for name, value in payload.entries.items():
            kind = kinds[name].kind if name in kinds else EXTRA
            classes[kind] = classes.get(kind, 0) + value.numel() * value.element_size()
        extra = size_of(payload.extras)
        if extra:
            classes[EXTRA] = classes.get(EXTRA, 0) + extra

    def total(self, direction: str, purpose: str = TRAINING) -> int:
        """Bytes in one direction for one purpose."""
        return sum(self.bytes[direction].get(purpose, {}).values())

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
        return {"bytes": self.bytes, "messages": self.messages, "seconds": self.seconds}

    @classmethod
    def from_numbers(cls, numbers: Mapping[str, Any]) -> Ledger:
        """The ledger that wrote these numbers."""
        return cls(numbers["bytes"], numbers["messages"], numbers["seconds"])


def size_of(value: Any) -> int:
    """Bytes of extras: tensors by their values, numbers as 8, text as UTF-8."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(size_of(item) for item in value)
    if isinstance(value, str):
        return len(value.encode())
    return 0 if value is None else 8


def counted(deliver: Deliver, ledger: Ledger, kinds: Mapping[str, Entry]) -> Deliver:
    """A delivery whose traffic is counted."""

    def count(ask: Ask) -> Replies:
        for payload in ask.payloads.values():
            ledger.note("down", ask.purpose, payload, kinds)
        ledger.messages[ask.purpose] = ledger.messages.get(ask.purpose, 0) + len(ask.payloads)
        for reply in deliver(ask):
            ledger.note("up", ask.purpose, reply.payload, kinds)
            yield reply

    return count
