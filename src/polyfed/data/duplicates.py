"""Images that are there twice: in more than one split (a leak), or in two domains. They are found by a hash of their pixels."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMED_AT_MOST = 5


@dataclass
class Duplicates:
    """Where each picture was seen: its domain, its split, and what to call it."""

    seen: dict[bytes, list[tuple[str, str, str]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, picture: bytes, domain: str, split: str, name: str) -> None:
        """Take a picture by its hash."""
        self.seen[picture].append((domain, split, name))

    def leaks(self) -> list[str]:
        """A sentence for the pictures that are in more than one of train, validation and test."""
        found = [places for places in self._several() if len({split for _, split, _ in places}) > 1]
        return _sentences("in more than one of train, validation and test", found)

    def across_domains(self) -> list[str]:
        """A sentence for the pictures that two domains have."""
        found = [places for places in self._several() if len({domain for domain, _, _ in places}) > 1]
        return _sentences("in more than one domain", found)

    def _several(self) -> Iterator[list[tuple[str, str, str]]]:
        return (places for places in self.seen.values() if len(places) > 1)


def picture_hash(pixels: NDArray[Any]) -> bytes:
    """A hash of the pixels and the shape of a picture."""
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).digest()[:16]


def _sentences(where: str, found: Sequence[Sequence[tuple[str, str, str]]]) -> list[str]:
    if not found:
        return []
    named = ["; ".join(f"{domain} {split} {name}" for domain, split, name in places) for places in found[:NAMED_AT_MOST]]
    more = f" And {len(found) - NAMED_AT_MOST} more." if len(found) > NAMED_AT_MOST else ""
    return [f"{len(found)} picture{'s are' if len(found) > 1 else ' is'} {where}: {' | '.join(named)}.{more}"]
