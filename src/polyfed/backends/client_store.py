"""What idle clients keep, packed: rows of common tensors, so that thousands of small clients cost little more than their values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from polyfed.core.workbench import ClientState

Layout: TypeAlias = tuple[tuple[str, torch.dtype, torch.Size], ...]
ALIGNED = 16
"""A view of another type must begin at a multiple of its size."""
OWN_TENSOR_FROM = 1 << 16
"""A client with at least this many bytes has a tensor of its own: the overhead of a tensor is nothing to it."""
FEWEST_ROWS, SMALLEST_ROW, LARGEST_CHUNK = 8, 256, 1 << 20


class EntryPlace(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


class Chunk:
    """Some rows in one tensor, and which of them are free."""

    __slots__ = ("free", "rows", "values")

    def __init__(self, rows: int, size: int) -> None:
        self.rows = rows
        self.values = torch.empty(rows, size, dtype=torch.uint8)
        self.free = list(reversed(range(rows)))

    @property
    def is_unused(self) -> bool:
        return len(self.free) == self.rows


class Slab:
    """The rows of all clients whose entries have one layout. It grows by chunks; a chunk without clients is given up."""

    def __init__(self, layout: Layout) -> None:
        self.places: list[EntryPlace] = []
        self.size = self.rows = 0
        for name, dtype, shape in layout:
            bytes_ = shape.numel() * dtype.itemsize
            self.places.append(EntryPlace(name, dtype, shape, self.size, self.size + bytes_))
            self.size += -(-bytes_ // ALIGNED) * ALIGNED
        self.open: dict[Chunk, None] = {}
        """Chunks with free rows. The others are referred to by their rows only."""

    def free_row(self, memory: dict[str, Any]) -> StoredState:
        """A free row, for a client with this memory."""
        chunk = next(reversed(self.open), None)
        if chunk is None:
            chunk = Chunk(self.rows_of_next_chunk(), self.size)
            self.open[chunk] = None
        place = chunk.free.pop()
        if not chunk.free:
            del self.open[chunk]
        self.rows += 1
        return StoredState(self, chunk, place, memory)

    def rows_of_next_chunk(self) -> int:
        """As many as there are, within bounds."""
        if self.size >= OWN_TENSOR_FROM:
            return 1
        return min(max(FEWEST_ROWS, self.rows), LARGEST_CHUNK // max(self.size, SMALLEST_ROW))

    def take_back(self, chunk: Chunk, place: int) -> None:
        """Let somebody else have a row. Rows may outlive torch when Python ends, so no tensor is asked for anything here."""
        self.rows -= 1
        chunk.free.append(place)
        if chunk.is_unused:
            self.open.pop(chunk, None)
        else:
            self.open[chunk] = None


class StoredState:
    """What one client keeps, in a row of a slab. The row is free again when nobody refers to this object any more."""

    __slots__ = ("chunk", "memory", "place", "slab")

    def __init__(self, slab: Slab, chunk: Chunk, place: int, memory: dict[str, Any]) -> None:
        self.slab, self.chunk, self.place = slab, chunk, place
        self.memory = memory or None

    def __del__(self) -> None:
        self.slab.take_back(self.chunk, self.place)

    def write(self, entries: Mapping[str, Tensor]) -> None:
        values = self.chunk.values[self.place]
        for entry in self.slab.places:
            if entry.end > entry.start:
                values[entry.start : entry.end].view(entry.dtype).copy_(entries[entry.name].detach().reshape(-1))

    def read(self) -> ClientState:
        values = self.chunk.values[self.place]
        # A row that was shared out may be somebody else's tomorrow, so the values are copied; a chunk of one row is never used again.
        values = values if self.chunk.rows == 1 else values.clone()
        entries = {at.name: values[at.start : at.end].view(at.dtype).view(at.shape) for at in self.slab.places}
        return ClientState(entries, {} if self.memory is None else self.memory)


class ClientStore(MutableMapping[str, ClientState]):
    """A dict of what clients keep. What is taken from it stays as it is; nobody may change its tensors in place."""

    def __init__(self, clients: Mapping[str, ClientState] | None = None) -> None:
        self._rows: dict[str, StoredState] = {}
        self._slabs: dict[Layout, Slab] = {}
        self.update(clients or {})

    def sibling(self) -> ClientStore:
        """An empty store that uses the same tensors, so that clients can move from one to the other without being copied."""
        other = ClientStore()
        other._slabs = self._slabs
        return other

    def __setitem__(self, client: str, state: ClientState) -> None:
        layout = tuple((name, value.dtype, value.shape) for name, value in state.entries.items())
        slab = self._slabs.get(layout)
        if slab is None:
            slab = self._slabs[layout] = Slab(layout)
        row = slab.free_row(state.memory)
        row.write(state.entries)
        self._rows[client] = row

    def __getitem__(self, client: str) -> ClientState:
        return self._rows[client].read()

    def take(self, other: ClientStore, without: Collection[str]) -> set[str]:
        """Take over the states of another store without copying them, except for some clients; returns whose they were."""
        moved = {client: row for client, row in other._rows.items() if client not in without}
        self._rows |= moved
        return set(moved)

    def __delitem__(self, client: str) -> None:
        del self._rows[client]

    def __contains__(self, client: object) -> bool:
        return client in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
