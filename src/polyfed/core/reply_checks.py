"""Why a reply cannot be used. Each check gives a sentence, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.entries import Entry
from polyfed.core.trees import leaves_in


def problem_with(entries: Mapping[str, Tensor], expected: Sequence[str], known: Mapping[str, Entry]) -> str:
    """Why these entries cannot be absorbed; empty when they can."""
    required = [name for name in expected if known[name].of is None]
    missing = [name for name in required if name not in entries]
    if missing:
        return f"{len(missing)} entries are missing, {missing[0]!r} first"
    allowed = set(expected)
    for name, value in entries.items():
        if name not in allowed:
            return f"{name!r} was not asked for"
        entry = known[name]
        if not isinstance(value, Tensor) or tuple(value.shape) != entry.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return f"{name!r} has the shape {found}, expected {entry.shape}"
        if value.dtype != entry.dtype:
            return f"{name!r} has the type {value.dtype}, expected {entry.dtype}"
    return next((f"{name!r} holds values that are not finite" for name, value in entries.items() if not all_finite(value)), "")


def problem_with_extras(extras: Mapping[str, Any], needed: Sequence[str] = ()) -> str:
    """Why the extras cannot be used; empty when it can."""
    missing = next((name for name in needed if name not in extras), None)
    if missing is not None:
        return f"{missing!r} is missing"
    bad = (name for name, value in extras.items() if not all(map(_is_finite, leaves_in(value))))
    return next((f"{name!r} holds values that are not finite" for name in bad), "")


def _is_finite(leaf: Any) -> bool:
    return all_finite(leaf) if isinstance(leaf, Tensor) else not isinstance(leaf, float) or math.isfinite(leaf)


def all_finite(value: Tensor) -> bool:
    """Whether every value is finite. A finite sum proves it at the speed of memory; only an infinite one needs a second look."""
    if not value.is_floating_point():
        return True
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
