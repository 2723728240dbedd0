"""Coordinate-wise median instead of the mean.

    w_j <- median over clients k of (w_k)_j;   of an even number, the mean of the two middle values

Every uploaded entry that holds real numbers, statistics too; counters take the maximum as everywhere. Clients count the same whatever their weight.

Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.

Differences from the paper: it takes medians of gradients, here of the models after local training. No code of the authors was checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.entries import Entry
from polyfed.core.method import Facts, Method, register
from polyfed.core.reducers import CollectedReducer, Entries
from polyfed.core.sharing import Select, reduce_with


@dataclass(frozen=True)
class EveryUpload(Select):
    """All entries, optimizer buffers too, should they be uploaded."""

    def matches(self, entry: Entry) -> bool:
        return True


every_upload = EveryUpload("every uploaded entry")


def counting(clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> list[tuple[Mapping[str, Tensor], float]]:
    """The clients whose weight is not zero."""
    return [(entries, weight) for entries, weight in zip(clients, weights, strict=True) if weight > 0]


def stacked(clients: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each entry with the values of all clients that sent it, one row a client."""
    for name in dict.fromkeys(name for entries in clients for name in entries):
        yield name, torch.stack([entries[name] for entries in clients if name in entries])


@dataclass(frozen=True)
class Median(CollectedReducer):
    """The coordinate-wise median."""

    def combine(
        self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reference: Mapping[str, Tensor]
    ) -> Entries:
        """Middle values; the maximum of integers."""
        chosen = [entries for entries, _ in counting(clients, weights)]
        return {name: middle(rows) if rows.is_floating_point() else rows.amax(0) for name, rows in stacked(chosen)}


def middle(rows: Tensor) -> Tensor:
    """The median of each column."""
    ordered, count = rows.sort(dim=0).values, len(rows)
    return torch.lerp(ordered[(count - 1) // 2], ordered[count // 2], 0.5)


@register
def median() -> Method:
    """Take the coordinate-wise median of the clients' models."""
    return Method(
        "median",
        sharing=(reduce_with(every_upload, Median()),),
        standalone=False,
        facts=Facts(extra_work="the server holds every reply"),
    )
