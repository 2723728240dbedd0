"""How much one client can move the mean: shares of weight are capped, and updates are scaled to a norm. Both are off unless asked for."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor


@functools.lru_cache(maxsize=8)
def capped(weights: tuple[float, ...], share: float) -> tuple[float, ...]:
    """Weights of which none is more than a share of their sum; those below stay. Where that cannot be, all are equal.

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
    """Entries whose change from ``start`` is scaled down to a norm, and the norm it had; a smaller change stays as it is to the bit.

    The norm is that of everything real-valued that the client changed, batch norm statistics included: what is left out of it
    could be moved without bound.
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
