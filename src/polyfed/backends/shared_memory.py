"""Memory that a process and its children share: tensors are copied into it once, and read where they lie.

It is a file without a name, in memory only. It grows when it must; who reads it maps the new part when a tensor lies there.
Trees of plain values and tensors are split into JSON with marks in place of the tensors, and put together again.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from polyfed.trees import as_json, from_json

ALIGNED = 64
SMALLEST = 1 << 16

Json: TypeAlias = Any
Mark: TypeAlias = dict[str, int]


class Spot(NamedTuple):
    """Where a tensor lies in shared memory. ``strides`` is None for the usual order of its values."""

    start: int
    dtype: str
    shape: list[int]
    strides: list[int] | None


class SharedMemory:
    """Shared memory that tensors are laid out in, one after the other, until it is cleared."""

    def __init__(self) -> None:
        self.file = os.memfd_create("polyfed")
        self.used = 0
        self.mapped: mmap.mmap | None = None
        self.close = weakref.finalize(self, os.close, self.file)

    def clear(self) -> None:
        """Let new tensors take the place of those that lie here."""
        self.used = 0

    def put(self, value: Tensor) -> Spot:
        if value.layout is not torch.strided:
            raise TypeError(f"Only dense tensors can be sent, found the layout {value.layout}.")
        strides = None if value.is_contiguous() else list(torch.empty_like(value, device="meta").stride())
        spot = Spot(self.used, str(value.dtype).removeprefix("torch."), list(value.shape), strides)
        self.view(spot).copy_(value.detach())
        size = value.numel() * value.element_size()
        self.used += -(-size // ALIGNED) * ALIGNED
        return spot

    def view(self, spot: Spot) -> Tensor:
        """The tensor at a spot, where it lies."""
        dtype: torch.dtype = getattr(torch, spot.dtype)
        count = math.prod(spot.shape)
        if count == 0:
            return torch.empty(spot.shape, dtype=dtype)
        memory = self._memory(spot.start + count * dtype.itemsize)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=spot.start)
        if spot.strides is not None:
            return flat.as_strided(spot.shape, spot.strides)
        return flat if len(spot.shape) == 1 else flat.view(spot.shape)

    def _memory(self, end: int) -> mmap.mmap:
        """The mapped memory, of at least this length. Views of an older, shorter mapping stay good: they are the same memory."""
        if self.mapped is None or len(self.mapped) < end:
            size = os.fstat(self.file).st_size
            if size < end:
                size = max(end + end // 2, SMALLEST)
                os.ftruncate(self.file, size)
            self.mapped = mmap.mmap(self.file, size)
        return self.mapped


def parted(tree: Any, mark: Callable[[Tensor], Mark]) -> Json:
    """A tree of plain values and tensors as JSON, with a mark in place of each tensor."""
    return as_json(tree, lambda value, _: mark(value))


def joined(json_tree: Json, tensor: Callable[[str, int], Tensor]) -> Any:
    """The tree that ``parted`` parted; ``tensor`` finds a tensor by its mark."""
    return from_json(json_tree, lambda mark: tensor(*next(iter(mark.items()))))
