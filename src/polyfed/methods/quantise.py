"""Quantised uploads: the change of each parameter in a few bits.

    d = w_k - w_received;   scale = (max d - min d) / (2^bits - 1);   code = floor((d - min d) / scale + u),  u uniform in [0, 1)
    the server restores w_received + min d + scale * code: right on average, and at most one scale off

An exchanged parameter travels as one tensor of bytes under its own name: min d and scale (4 bytes each, 8 in double precision), then the codes, 8/bits
to a byte; the bytes counted are those that travel. Everything else (statistics, counters, buffers, entries that are not sent down) passes unchanged.

Reference: Alistarh et al., QSGD, NeurIPS 2017; Reisizadeh et al., FedPAQ, AISTATS 2020 (quantised changes of models). bits = 8: our choice.

Differences from the papers: levels lie evenly between the smallest and the largest change of a tensor instead of between 0 and its norm; codes are not
entropy-coded. ``stochastic=False`` rounds to the nearest level. No code of the authors was checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.entries import Entry
from polyfed.core.method import Method, register
from polyfed.core.server import Server
from polyfed.core.workbench import Workbench
from polyfed.errors import JoinError, OptionError
from polyfed.methods.fedavgm import exchanged_parameters, require_exchange

WIDTHS = (1, 2, 4, 8)


def refuse_unknown_start(bench: Workbench, part: str) -> None:
    """A change can be undone only where the server knows what the client started from."""
    require_exchange(bench, part)
    if bench.method.outgoing is not None or bench.method.receiving:
        raise JoinError(
            f"{bench.method}: {part} sends changes of what the server sent, but another part makes clients start from something else. "
            f"Leave {part} out."
        )


def precise(dtype: torch.dtype) -> torch.dtype:
    """The type in which a change is measured."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Quantise:
    """Changes as codes; ``undo`` restores values at the server."""

    bits: int
    stochastic: bool
    stage = "compress"
    reads_data = False

    def __call__(self, client: Client, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [n for n in exchanged_parameters(client.bench.plan, client.round) if n in entries and entries[n].numel()]
        changes = {name: entries[name] - client.received[name] for name in names}
        return {**entries, **{name: self.encoded(change, client.generator) for name, change in changes.items()}}

    def undo(self, server: Server, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values from bytes; what does not have the right size stays as it is, and is then rejected."""
        restored = dict(entries)
        for name in exchanged_parameters(server.plan, server.round):
            entry, value = server.plan.entries[name], entries.get(name)
            if value is not None and value.dtype == torch.uint8 and value.dim() == 1 and len(value) == self.size(entry):
                restored[name] = (server.state[name] + self.decoded(value, entry)).to(entry.dtype)
        return restored

    def size(self, entry: Entry) -> int:
        """Bytes of an encoded entry."""
        values = entry.size // entry.dtype.itemsize
        return 2 * precise(entry.dtype).itemsize + math.ceil(values * self.bits / 8)

    def encoded(self, change: Tensor, stream: torch.Generator) -> Tensor:
        """Smallest change, scale and codes as bytes."""
        flat = change.flatten().to(precise(change.dtype))
        low, high = flat.aminmax()
        levels = 2**self.bits - 1
        scale = (high - low) / levels
        shift = torch.rand(flat.shape, generator=stream, dtype=flat.dtype).to(flat.device) if self.stochastic else 0.5
        exact = torch.where(scale > 0, (flat - low) / scale, 0.0)
        codes = (exact + shift).floor().clamp(0, levels).to(torch.uint8)
        return torch.cat([torch.stack([low, scale]).view(torch.uint8), packed(codes, self.bits)])

    def decoded(self, value: Tensor, entry: Entry) -> Tensor:
        """The change that these bytes stand for."""
        head = 2 * precise(entry.dtype).itemsize
        low, scale = value[:head].clone().view(precise(entry.dtype))
        codes = unpacked(value[head:], self.bits)[: entry.size // entry.dtype.itemsize]
        change: Tensor = (low + scale * codes).reshape(entry.shape)
        return change

    def check(self, bench: Workbench) -> None:
        """The server must know what the change is to."""
        refuse_unknown_start(bench, "quantise")


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes of a given number of bits, several to a byte."""
    per = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % per)).view(-1, per).int()
    return (padded << (bits * torch.arange(per, dtype=torch.int32, device=codes.device))).sum(dim=1).to(torch.uint8)


def unpacked(value: Tensor, bits: int) -> Tensor:
    """The codes in some bytes, with those that fill the last byte."""
    shifts = bits * torch.arange(8 // bits, dtype=torch.int32, device=value.device)
    codes: Tensor = (value.int()[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()


@register(shows=("bits",))
def quantise(bits: int = 8, stochastic: bool = True) -> Method:
    """Upload changes of parameters in a few bits.

    Args:
        bits: bits for each value: 1, 2, 4 or 8; 32 changes nothing.
        stochastic: round at random, right on average; else to the nearest level.
    """
    if bits not in (*WIDTHS, 32):
        raise OptionError(f"quantise: bits can be 1, 2, 4, 8, or 32 for no change, found {bits}.")
    return Method("quantise", uploads=(Quantise(bits, stochastic),) if bits < 32 else (), standalone=False)
