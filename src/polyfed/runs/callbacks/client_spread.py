"""How far clients' models lie apart: for each kind of entry that differs between clients, its deviation over clients, round by round.

The models are those that clients would be tested with: what the server sends to each, and what each keeps. Where all clients have the
server's model, there is nothing to tell; where clients keep their entries on other machines, it is not known here. Of many clients a
few are looked at, always the same, so that a round costs the same however many clients there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.backends.base import Backend
from polyfed.core.server import Server

SPREAD, ALL = "spread", "all"
MOST_CLIENTS = 20
"""Of more clients than this, as many are looked at, evenly spaced over the list of clients."""

CHUNK = 1 << 18
"""Values that are worked on at a time."""


@dataclass
class Moments:
    """Mean and summed squared deviations of tensors over clients, one client after the other."""

    count: dict[str, int] = field(default_factory=dict)
    mean: dict[str, Tensor] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor]) -> None:
        """Take in one client."""
        for name, value in values.items():
            value = value.float()
            if name not in self.mean:
                self.count[name], self.mean[name], self.squares[name] = 0, _zeros(value), _zeros(value)
            self.count[name] += 1
            for part, mean, squares in _chunks(value, self.mean[name], self.squares[name]):
                off = part - mean
                mean += off / self.count[name]
                squares += off * (part - mean)

    def variance(self, name: str) -> Tensor:
        """The variance of each value over clients."""
        return self.squares[name].clamp_min(0) / self.count[name]

    def in_parts(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Mean and variance of each value, some values at a time."""
        for mean, squares in _chunks(self.mean[name], self.squares[name]):
            yield mean, squares.clamp_min(0) / self.count[name]


def _zeros(value: Tensor) -> Tensor:
    return torch.zeros_like(value, memory_format=torch.contiguous_format)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of tensors of one shape: temporary copies of whole models would take more time than the sums."""
    return zip(*(torch.split(tensor.flatten(), CHUNK) for tensor in tensors), strict=True)


def spread_lines(server: Server, backend: Backend, initial: Mapping[str, Tensor]) -> list[Mapping[str, Any]]:
    """A line of metrics for each kind of entry in which clients' models differ.

    ``deviation`` is the standard deviation of a value over clients, averaged over the values of this kind; ``relative`` is its root mean
    square as a share of the root mean square of the values themselves.
    """
    moments = Moments()
    for values in differing_entries(server, backend, initial):
        moments.add(values)
    kinds: dict[str, list[str]] = {}
    for name in moments.mean:
        kinds.setdefault(server.plan.entries[name].kind, []).append(name)
    return [
        {"round": server.round, "view": SPREAD, "client": ALL, "kind": kind, **_numbers(moments, names)}
        for kind, names in kinds.items()
    ]


def differing_entries(server: Server, backend: Backend, initial: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Of each client, the entries of its model that are not the server's own; nothing where they cannot be known."""
    entries, down = server.plan.entries, set(server.phase.down)
    own = [n for n, entry in entries.items() if entry.of is None and entry.dtype.is_floating_point and n not in down]
    ids = few_clients(server)
    if len(ids) < 2 or not (own or server.method.outgoing) or (own and not all(map(backend.can_read, ids))):
        return
    for client in ids:
        kept = backend.state_of(client).entries if own else {}
        sent = server.outgoing(client) if server.method.outgoing else {}
        made = {name: value for name, value in sent.items() if value is not server.state.get(name) and entries[name].of is None}
        yield made | {name: kept.get(name, initial[name]) for name in own}


def few_clients(server: Server) -> list[str]:
    """The clients that are looked at after a round: all, or as many as keep a round's cost the same whatever their number."""
    clients = [info.id for info in server.clients]
    step = max(1, len(clients) / MOST_CLIENTS)
    return [clients[int(place * step)] for place in range(min(len(clients), MOST_CLIENTS))]


def _numbers(moments: Moments, names: list[str]) -> dict[str, float]:
    variances = {name: moments.variance(name) for name in names}
    count = sum(value.numel() for value in variances.values())
    deviation = sum(float(value.sqrt().sum(dtype=torch.float64)) for value in variances.values()) / count
    variance = sum(float(value.sum(dtype=torch.float64)) for value in variances.values()) / count
    square = variance + sum(float(moments.mean[name].square().sum(dtype=torch.float64)) for name in names) / count
    return {"deviation": deviation, "relative": math.sqrt(variance / square) if square > 0 else 0.0}
