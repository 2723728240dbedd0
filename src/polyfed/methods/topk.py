"""Sparse uploads: only the largest changes of each parameter.

    d = w_k - w_received + e_k;   the ceil(share * size) entries of d largest in magnitude are sent;   e_k <- what was not sent
    the server restores w_received + sent changes

An exchanged parameter travels as one tensor of bytes under its own name: positions (4 bytes each), then values; the bytes counted are those that travel. A
parameter that would not get smaller passes unchanged, as does everything else (statistics, counters, buffers, entries that are not sent down).

Reference: Stich et al., Sparsified SGD with Memory, NeurIPS 2018 (e_k is its memory); Aji and Heafield, Sparse Communication for Distributed Gradient Descent,
EMNLP 2017. share = 0.01: a common choice.

Differences from the papers: they sparsify gradients of single steps, here changes of a whole round, tensor by tensor. ``memory=False`` forgets what was not
sent and keeps nothing at clients. No code of the authors was checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.entries import Entry
from polyfed.core.method import Facts, Method, register
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.errors import OptionError
from polyfed.methods.fedavgm import exchanged_parameters
from polyfed.methods.quantise import refuse_unknown_start

POSITION = torch.int32


@dataclass(frozen=True)
class LargestChanges:
    """Positions and values of the largest changes; ``undo`` restores values at the server."""

    share: float
    memory: bool
    stage = "compress"
    reads_data = False

    def __call__(self, client: Client, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sent, plan = dict(entries), client.bench.plan
        left: dict[str, Tensor] = dict(client.memory.get("topk", {}))
        for name in exchanged_parameters(plan, client.round):
            if name in entries and self.shrinks(plan.entries[name]):
                change = (entries[name] - client.received[name]).flatten()
                change = change + left[name] if name in left else change
                sent[name], left[name] = self.encoded(change)
        if self.memory:
            client.memory["topk"] = left
        return sent

    def undo(self, server: Server, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values from bytes; what cannot be read stays as it is, and is then rejected."""
        restored = dict(entries)
        for name in exchanged_parameters(server.plan, server.round):
            entry, value = server.plan.entries[name], entries.get(name)
            if value is not None and value.dtype == torch.uint8 and value.shape == (self.size(entry),):
                positions, changes = self.decoded(value, entry)
                flat = server.state[name].flatten().clone()
                if bool(((positions >= 0) & (positions < len(flat))).all()):
                    restored[name] = flat.index_add(0, positions, changes).reshape(entry.shape)
        return restored

    def count(self, values: int) -> int:
        """How many of n values are sent."""
        return max(1, math.ceil(self.share * values - 1e-9))

    def size(self, entry: Entry) -> int:
        """Bytes of an encoded entry."""
        return self.count(entry.size // entry.dtype.itemsize) * (POSITION.itemsize + entry.dtype.itemsize)

    def shrinks(self, entry: Entry) -> bool:
        """Whether positions and values take less room than the entry."""
        return self.size(entry) < entry.size

    def encoded(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and values as bytes, and what is left."""
        positions = change.abs().topk(self.count(len(change))).indices.sort().values
        values = change[positions]
        left = change.index_fill(0, positions, 0.0)
        return torch.cat([positions.to(POSITION).view(torch.uint8), values.view(torch.uint8)]), left

    def decoded(self, value: Tensor, entry: Entry) -> tuple[Tensor, Tensor]:
        """Positions and values."""
        head = self.count(entry.size // entry.dtype.itemsize) * POSITION.itemsize
        return value[:head].clone().view(POSITION).long(), value[head:].clone().view(entry.dtype)

    def check(self, bench: Workbench) -> None:
        """The server must know what the change is to."""
        refuse_unknown_start(bench, "topk")


@register(shows=("share",))
def topk(share: float = 0.01, memory: bool = True) -> Method:
    """Upload only the largest changes of each parameter.

    Args:
        share: share of each parameter's values that is sent; 1.0 changes nothing.
        memory: clients keep what was not sent and add it the next time.
    """
    if not 0 < share <= 1:
        raise OptionError(f"topk: share lies in (0, 1], found {share}.")
    acts = share < 1
    uploads = (LargestChanges(share, memory),) if acts else ()
    return Method("topk", uploads=uploads, standalone=False, facts=Facts(client_state=acts and memory))
