"""Client states packed as rows of common tensors, so that thousands of small clients need little more memory than their values."""

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
"""Clients with at least this many bytes get a separate tensor, whose overhead is negligible at this size."""
MIN_ROWS, MIN_ROW_BYTES, MAX_CHUNK_BYTES = 8, 256, 1 << 20


class EntryPlace(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


class Chunk:
    __slots__ = ("free", "rows", "values")

    def __init__(self, rows: int, size: int) -> None:
        self.rows = rows
        self.values = torch.empty(rows, size, dtype=torch.uint8)
        self.free = list(reversed(range(rows)))


class Slab:
    """The rows of all clients whose entries have the same layout. It grows by chunks; unused chunks are released."""

    def __init__(self, layout: Layout) -> None:
        self.places: list[EntryPlace] = []
        self.size = self.rows = 0
        for name, dtype, shape in layout:
            num_bytes = shape.numel() * dtype.itemsize
            self.places.append(EntryPlace(name, dtype, shape, self.size, self.size + num_bytes))
            self.size += -(-num_bytes // ALIGNED) * ALIGNED
        self.open: dict[Chunk, None] = {}
        """Chunks with free rows. The other chunks are referenced by their rows only."""

    def allocate(self, memory: dict[str, Any]) -> StoredState:
        chunk = next(reversed(self.open), None)
        if chunk is None:
            # Each chunk doubles the number of rows, within bounds.
            rows = min(max(MIN_ROWS, self.rows), MAX_CHUNK_BYTES // max(self.size, MIN_ROW_BYTES))
            chunk = Chunk(1 if self.size >= OWN_TENSOR_FROM else rows, self.size)
            self.open[chunk] = None
        row = chunk.free.pop()
        if not chunk.free:
            del self.open[chunk]
        self.rows += 1
        return StoredState(self, chunk, row, memory)

    def release(self, chunk: Chunk, row: int) -> None:
        """Mark a row as free. Rows may outlive torch when Python exits, so no tensor is touched here."""
        self.rows -= 1
        chunk.free.append(row)
        if len(chunk.free) == chunk.rows:
            self.open.pop(chunk, None)
        else:
            self.open[chunk] = None


class StoredState:
    """One client state in a row of a slab. The row is released when this object is deleted."""

    __slots__ = ("chunk", "memory", "row", "slab")

    def __init__(self, slab: Slab, chunk: Chunk, row: int, memory: dict[str, Any]) -> None:
        self.slab, self.chunk, self.row = slab, chunk, row
        self.memory = memory or None

    def __del__(self) -> None:
        self.slab.release(self.chunk, self.row)

    def write(self, entries: Mapping[str, Tensor]) -> None:
        values = self.chunk.values[self.row]
        for entry in self.slab.places:
            if entry.end > entry.start:
                values[entry.start : entry.end].view(entry.dtype).copy_(entries[entry.name].detach().reshape(-1))

    def read(self) -> ClientState:
        values = self.chunk.values[self.row]
        # Rows of a shared chunk are reused by other clients, so the values are copied. A chunk with one row is never reused.
        values = values if self.chunk.rows == 1 else values.clone()
        entries = {at.name: values[at.start : at.end].view(at.dtype).view(at.shape) for at in self.slab.places}
        return ClientState(entries, {} if self.memory is None else self.memory)


class ClientStore(MutableMapping[str, ClientState]):
    """A mapping from client ids to states. Later writes do not affect a state that was read; do not change its tensors in place."""

    def __init__(self, clients: Mapping[str, ClientState] | None = None) -> None:
        self._rows: dict[str, StoredState] = {}
        self._slabs: dict[Layout, Slab] = {}
        self.update(clients or {})

    def sibling(self) -> ClientStore:
        """Return an empty store that shares the tensors of this one, so that ``take`` needs no copies."""
        other = ClientStore()
        other._slabs = self._slabs
        return other

    def take(self, other: ClientStore, without: Collection[str]) -> set[str]:
        """Move the states of another store here without copying, except those of ``without``, and return their client ids."""
        moved = {client: row for client, row in other._rows.items() if client not in without}
        self._rows |= moved
        return set(moved)

    def __setitem__(self, client: str, state: ClientState) -> None:
        layout = tuple((name, value.dtype, value.shape) for name, value in state.entries.items())
        slab = self._slabs.get(layout)
        if slab is None:
            slab = self._slabs[layout] = Slab(layout)
        row = slab.allocate(state.memory)
        row.write(state.entries)
        self._rows[client] = row

    def __getitem__(self, client: str) -> ClientState:
        return self._rows[client].read()

    def __delitem__(self, client: str) -> None:
        del self._rows[client]

    def __contains__(self, client: object) -> bool:
        return client in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
