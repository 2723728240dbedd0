"""Memory that a process shares with its children. Tensors are copied into it once and read in place."""

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
MIN_BYTES = 1 << 16

Json: TypeAlias = Any
Mark: TypeAlias = dict[str, int]


class Spot(NamedTuple):
    """Location of a tensor in shared memory. ``strides`` is None if the tensor is contiguous."""

    start: int
    dtype: str
    shape: list[int]
    strides: list[int] | None


class SharedMemory:
    """Tensors stored one after the other in an anonymous file in memory, until it is cleared."""

    def __init__(self) -> None:
        self.file = os.memfd_create("polyfed")
        self.used = 0
        self.mapped: mmap.mmap | None = None
        self.close = weakref.finalize(self, os.close, self.file)

    def clear(self) -> None:
        """Allow new tensors to overwrite the current ones."""
        self.used = 0

    def put(self, value: Tensor) -> Spot:
        if value.layout is not torch.strided:
            raise TypeError(f"Only dense tensors can be sent, got layout {value.layout}.")
        strides = None if value.is_contiguous() else list(torch.empty_like(value, device="meta").stride())
        spot = Spot(self.used, str(value.dtype).removeprefix("torch."), list(value.shape), strides)
        self.view(spot).copy_(value.detach())
        size = value.numel() * value.element_size()
        self.used += -(-size // ALIGNED) * ALIGNED
        return spot

    def view(self, spot: Spot) -> Tensor:
        """Return the tensor at a spot without copying it."""
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
        """Return a mapping of at least this length. Views of an older, shorter mapping stay valid: the memory is the same."""
        if self.mapped is None or len(self.mapped) < end:
            size = os.fstat(self.file).st_size
            if size < end:
                size = max(end + end // 2, MIN_BYTES)
                os.ftruncate(self.file, size)
            self.mapped = mmap.mmap(self.file, size)
        return self.mapped


def to_json(tree: Any, mark: Callable[[Tensor], Mark]) -> Json:
    """Convert a tree of plain values and tensors to JSON, with a mark instead of each tensor."""
    return as_json(tree, lambda value, _: mark(value))


def to_tree(json_tree: Json, tensor: Callable[[str, int], Tensor]) -> Any:
    """Convert JSON from ``to_json`` back to a tree. ``tensor`` returns the tensor of a mark."""
    return from_json(json_tree, lambda mark: tensor(*next(iter(mark.items()))))
