"""Reducers combine the entries of many clients: running mean, first, largest. Bounds limit the influence of one client.

A reducer starts a folding over a group of entries. The folding receives replies one by one, so a mean keeps only one model in memory.
Reducers that need all replies at once subclass ``CollectedReducer``. Bounds (capped weights, update norms) are off by default.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Entries: TypeAlias = "dict[str, Tensor]"


class Folding(Protocol):
    """Reduction in progress."""

    def add(self, entries: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's values of the group."""

    def finish(self) -> Entries:
        """Return the reduced values."""


class Reducer(Protocol):
    """Starts a folding for a group of entries. ``reference`` contains the server's current values."""

    def start(self, reference: Mapping[str, Tensor]) -> Folding: ...


class Reduction:
    """Folds replies into one state, each group of entries with its reducer. Replies may lack some entries."""

    def __init__(self, groups: Mapping[Reducer, Sequence[str]], reference: Mapping[str, Tensor] | None = None) -> None:
        current = reference or {}
        self.foldings = [
            (names, reducer.start({name: current[name] for name in names if name in current}))
            for reducer, names in groups.items()
            if names
        ]

    def add(self, entries: Mapping[str, Tensor], weight: float) -> None:
        for names, folding in self.foldings:
            folding.add({name: entries[name] for name in names if name in entries}, weight)

    def finish(self) -> Entries:
        return {name: value for _, folding in self.foldings for name, value in folding.finish().items()}


@dataclass(frozen=True)
class Mean:
    """Weighted mean, as a running mean, so that the total weight is not needed in advance."""

    def start(self, reference: Mapping[str, Tensor]) -> Folding:
        return _RunningMean()


class _RunningMean:
    def __init__(self) -> None:
        self.total = 0.0
        self.mean: Entries = {}

    def add(self, entries: Mapping[str, Tensor], weight: float) -> None:
        if weight <= 0:
            return
        self.total += weight
        share = weight / self.total
        for name, value in entries.items():
            if name not in self.mean:
                self.mean[name] = value.to(_summed_in(value), copy=True)
            else:
                self.mean[name].lerp_(value.to(self.mean[name].dtype), share)

    def finish(self) -> Entries:
        return self.mean


def _summed_in(value: Tensor) -> torch.dtype:
    if not value.is_floating_point():
        raise TypeError("an integer entry cannot be averaged; use a different reducer")
    return torch.float32 if value.element_size() < 4 else value.dtype


@dataclass(frozen=True)
class First:
    """Value of the first client in canonical order (most samples)."""

    def start(self, reference: Mapping[str, Tensor]) -> Folding:
        return _FirstSeen()


class _FirstSeen:
    def __init__(self) -> None:
        self.seen: Entries = {}

    def add(self, entries: Mapping[str, Tensor], weight: float) -> None:
        for name, value in entries.items():
            self.seen.setdefault(name, value)

    def finish(self) -> Entries:
        return self.seen


@dataclass(frozen=True)
class Largest:
    """Element-wise maximum, used for counters, so that integers stay integers."""

    def start(self, reference: Mapping[str, Tensor]) -> Folding:
        return _LargestSeen()


class _LargestSeen(_FirstSeen):
    def add(self, entries: Mapping[str, Tensor], weight: float) -> None:
        for name, value in entries.items():
            self.seen[name] = torch.maximum(self.seen[name], value) if name in self.seen else value


def by_type(names: Mapping[str, torch.dtype]) -> dict[Reducer, list[str]]:
    """Group entries by default reducer: the mean for floating point, the maximum for integers."""
    groups: dict[Reducer, list[str]] = {Mean(): [], Largest(): []}
    for name, dtype in names.items():
        groups[Mean() if dtype.is_floating_point else Largest()].append(name)
    return groups


class CollectedReducer:
    """Base class of reducers that need all replies at once. Subclasses implement ``combine``."""

    def start(self, reference: Mapping[str, Tensor]) -> Folding:
        return _Collection(self, reference)

    def combine(
        self, clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], reference: Mapping[str, Tensor]
    ) -> Entries:
        """Return the reduced values of the group."""
        raise TypeError(f"{type(self).__name__} must implement combine()")


class _Collection:
    def __init__(self, reducer: CollectedReducer, reference: Mapping[str, Tensor]) -> None:
        self.reducer, self.reference = reducer, reference
        self.clients: list[Mapping[str, Tensor]] = []
        self.weights: list[float] = []

    def add(self, entries: Mapping[str, Tensor], weight: float) -> None:
        self.clients.append(dict(entries))
        self.weights.append(weight)

    def finish(self) -> Entries:
        return self.reducer.combine(self.clients, self.weights, self.reference) if self.clients else {}


@functools.lru_cache(maxsize=8)
def capped(weights: tuple[float, ...], share: float) -> tuple[float, ...]:
    """Cap weights at a fraction of their sum. If that is impossible, all weights are equal.

    >>> capped((20_000_000.0, 100.0, 100.0), 0.5)
    (200.0, 100.0, 100.0)
    >>> capped((3.0, 2.0, 1.0), 0.1)
    (1.0, 1.0, 1.0)
    """
    ranked = sorted(weights, reverse=True)
    for count, largest in enumerate(ranked):
        if count * share >= 1:
            break
        cap = share * math.fsum(ranked[count:]) / (1 - count * share)
        if largest <= cap:
            return tuple(min(weight, cap) for weight in weights) if count else weights
    return (1.0,) * len(weights)


@torch.no_grad()
def bounded(entries: Mapping[str, Tensor], start: Mapping[str, Tensor], largest: float) -> tuple[Mapping[str, Tensor], float]:
    """Scale the change from ``start`` down to a norm. Return the entries and the original norm; smaller changes are bit-identical.

    The norm covers all floating-point entries, including batch-norm statistics, since an excluded entry could change without bound.
    """
    changes = {
        name: value.double() - start[name].double()
        for name, value in entries.items()
        if name in start and value.is_floating_point() and value.shape == start[name].shape
    }
    norm = math.sqrt(math.fsum(float(change.square().sum()) for change in changes.values()))
    if norm <= largest:
        return entries, norm
    factor = largest / norm
    scaled = {name: (start[name].double() + factor * change).to(entries[name].dtype) for name, change in changes.items()}
    return {**entries, **scaled}, norm
