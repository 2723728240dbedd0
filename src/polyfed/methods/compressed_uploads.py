"""Compressed uploads: quantised or sparsified parameter changes. Differences from the paper: docs/methods, one page per method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.entries import Entry
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, OptionError
from polyfed.methods.server_optimizers import exchanged_parameters, require_exchange

WIDTHS = (1, 2, 4, 8)
POSITION = torch.int32


def _refuse_unknown_start(bench: Workbench, part: str) -> None:
    """Require that clients start from the state that the server sent; only then can it decode changes."""
    require_exchange(bench, part)
    if bench.method.outgoing is not None or bench.method.receiving:
        raise JoinError(
            f"{bench.method}: {part} uploads changes relative to the state from the server, but another part makes clients start from a different state. "
            f"Remove {part}."
        )


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Quantise(Part):
    """Encode changes as integer codes; ``undo`` restores the values at the server."""

    bits: int
    stochastic: bool
    stage = "compress"
    reads_data = False

    def __call__(self, client: Client, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [n for n in exchanged_parameters(client.bench.plan, client.round) if n in entries and entries[n].numel()]
        changes = {name: entries[name] - client.received[name] for name in names}
        return {**entries, **{name: self.encoded(change, client.generator) for name, change in changes.items()}}

    def undo(self, server: Server, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode bytes to values. Bytes of the wrong size are returned unchanged and rejected later."""
        restored = dict(entries)
        for name in exchanged_parameters(server.plan, server.round):
            entry, value = server.plan.entries[name], entries.get(name)
            if value is not None and value.dtype == torch.uint8 and value.dim() == 1 and len(value) == self.size(entry):
                restored[name] = (server.state[name] + self.decoded(value, entry)).to(entry.dtype)
        return restored

    def size(self, entry: Entry) -> int:
        values = entry.size // entry.dtype.itemsize
        return 2 * _precise(entry.dtype).itemsize + math.ceil(values * self.bits / 8)

    def encoded(self, change: Tensor, stream: torch.Generator) -> Tensor:
        """Return the smallest change, the scale and the codes as bytes."""
        flat = change.flatten().to(_precise(change.dtype))
        low, high = flat.aminmax()
        levels = 2**self.bits - 1
        scale = (high - low) / levels
        shift = torch.rand(flat.shape, generator=stream, dtype=flat.dtype).to(flat.device) if self.stochastic else 0.5
        exact = torch.where(scale > 0, (flat - low) / scale, 0.0)
        codes = (exact + shift).floor().clamp(0, levels).to(torch.uint8)
        return torch.cat([torch.stack([low, scale]).view(torch.uint8), packed(codes, self.bits)])

    def decoded(self, value: Tensor, entry: Entry) -> Tensor:
        head = 2 * _precise(entry.dtype).itemsize
        low, scale = value[:head].clone().view(_precise(entry.dtype))
        codes = unpacked(value[head:], self.bits)[: entry.size // entry.dtype.itemsize]
        change: Tensor = (low + scale * codes).reshape(entry.shape)
        return change

    def check(self, bench: Workbench) -> None:
        _refuse_unknown_start(bench, "quantise")


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of a given number of bits into bytes."""
    per = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % per)).view(-1, per).int()
    return (padded << (bits * torch.arange(per, dtype=torch.int32, device=codes.device))).sum(dim=1).to(torch.uint8)


def unpacked(value: Tensor, bits: int) -> Tensor:
    """Unpack the codes from bytes, including the padding of the last byte."""
    shifts = bits * torch.arange(8 // bits, dtype=torch.int32, device=value.device)
    codes: Tensor = (value.int()[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()


@register(shows=("bits",))
def quantise(bits: int = 8, stochastic: bool = True) -> Method:
    """Upload changes of parameters in a few bits.

        d = w_k - w_received
        scale = (max d - min d) / (2^bits - 1)
        code = floor((d - min d) / scale + u),   u uniform in [0, 1)   (stochastic=False: u = 1/2)
        server:  w_received + min d + scale * code

    Args:
        bits: bits per value: 1, 2, 4 or 8; 32 disables quantisation.
        stochastic: round at random, without bias; False: to the nearest level.

    Reference:
        D. Alistarh et al. QSGD. NeurIPS 2017.
        A. Reisizadeh et al. FedPAQ. AISTATS 2020.
    """
    if bits not in (*WIDTHS, 32):
        raise OptionError(f"quantise: bits must be 1, 2, 4, 8, or 32 for no change, got {bits}.")
    return Method("quantise", uploads=(Quantise(bits, stochastic),) if bits < 32 else (), standalone=False)


@dataclass(frozen=True)
class LargestChanges(Part):
    """Encode positions and values of the largest changes; ``undo`` restores the values at the server."""

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
        """Decode bytes to values. Invalid bytes are returned unchanged and rejected later."""
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
        return max(1, math.ceil(self.share * values - 1e-9))

    def size(self, entry: Entry) -> int:
        return self.count(entry.size // entry.dtype.itemsize) * (POSITION.itemsize + entry.dtype.itemsize)

    def shrinks(self, entry: Entry) -> bool:
        return self.size(entry) < entry.size

    def encoded(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions and values as bytes, and the changes that are not sent."""
        positions = change.abs().topk(self.count(len(change))).indices.sort().values
        values = change[positions]
        left = change.index_fill(0, positions, 0.0)
        return torch.cat([positions.to(POSITION).view(torch.uint8), values.view(torch.uint8)]), left

    def decoded(self, value: Tensor, entry: Entry) -> tuple[Tensor, Tensor]:
        head = self.count(entry.size // entry.dtype.itemsize) * POSITION.itemsize
        return value[:head].clone().view(POSITION).long(), value[head:].clone().view(entry.dtype)

    def check(self, bench: Workbench) -> None:
        _refuse_unknown_start(bench, "topk")


@register(shows=("share",))
def topk(share: float = 0.01, memory: bool = True) -> Method:
    """Upload only the largest changes of each parameter.

        d = w_k - w_received + e_k                   e_k starts at 0
        sent: the ceil(share * size) values of d largest in magnitude, with their positions
        e_k <- what was not sent                     (memory=False: discarded)
        server:  w_received + sent

    Args:
        share: fraction of each parameter's values that is sent; 1.0 sends all.
        memory: clients keep the changes that were not sent and add them in the next round.

    Reference:
        S. U. Stich et al. Sparsified SGD with Memory. NeurIPS 2018.
        A. F. Aji and K. Heafield. Sparse Communication for Distributed Gradient Descent. EMNLP 2017.
    """
    if not 0 < share <= 1:
        raise OptionError(f"topk: share must be in (0, 1], got {share}.")
    acts = share < 1
    uploads = (LargestChanges(share, memory),) if acts else ()
    return Method("topk", uploads=uploads, standalone=False, facts=Facts(client_state=acts and memory))
