"""What idle clients keep, packed: one tensor a client, so that thousands of them cost little more than their values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from polyfed.client import Kept

Layout: TypeAlias = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
ALIGNED = 16
"""A view of another type must begin at a multiple of its size."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One client: the values of its entries end to end, and its memory. The layout is shared by all clients that have it."""

    layout: Layout
    values: Tensor
    memory: dict[str, Any]


class Shelf(MutableMapping[str, Kept]):
    """A dict of what clients keep. A Kept taken from it holds views, which nobody may change in place."""

    def __init__(self, clients: Mapping[str, Kept] | None = None) -> None:
        self._packed: dict[str, Packed] = {}
        self._layouts: dict[Layout, Layout] = {}
        self.update(clients or {})

    def __setitem__(self, client: str, kept: Kept) -> None:
        found = tuple((name, value.dtype, tuple(value.shape)) for name, value in kept.entries.items())
        layout = self._layouts.setdefault(found, found)
        self._packed[client] = Packed(layout, _joined(kept.entries), kept.memory)

    def __getitem__(self, client: str) -> Kept:
        held = self._packed[client]
        return Kept(_parted(held.layout, held.values), held.memory)

    def take(self, other: Shelf, without: Collection[str]) -> set[str]:
        """Take over what another shelf holds, as it lies, except for some clients; returns whose it was."""
        moved = {client: held for client, held in other._packed.items() if client not in without}
        self._packed |= moved
        return set(moved)

    def __delitem__(self, client: str) -> None:
        del self._packed[client]

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def _room(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _joined(entries: Mapping[str, Tensor]) -> Tensor:
    sizes = [value.numel() * value.element_size() for value in entries.values()]
    values = torch.zeros(sum(map(_room, sizes)), dtype=torch.uint8)
    start = 0
    for value, size in zip(entries.values(), sizes, strict=True):
        if size:
            values[start : start + size].view(value.dtype).copy_(value.detach().reshape(-1))
        start += _room(size)
    return values


def _parted(layout: Layout, values: Tensor) -> dict[str, Tensor]:
    entries, start = {}, 0
    for name, dtype, shape in layout:
        size = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = values[start : start + size].view(dtype).view(shape)
        start += _room(size)
    return entries
