"""Format numbers, names and JSON values, and list the kinds of named things, without heavy imports: every command loads this."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KINDS = ("methods", "data", "models", "partitions", "losses")
RECIPES = "recipes"
EXPERIMENTS = "experiments"
LISTS = {
    "methods": "client and server algorithms; combine them with +",
    "data": "data sets and image folders",
    "models": "networks",
    "partitions": "ways to split domains across clients",
    "losses": "task losses",
    RECIPES: "settings files, ready to run",
    EXPERIMENTS: "published tables and figures to reproduce",
}
"""Every kind with its description."""


def percent(value: float, error: float | None = None) -> str:
    """Format a fraction as a percentage with its error.

    >>> percent(0.8314, 0.0123)
    '83.1 ±1.2'
    """
    return f"{100 * value:.1f}" + ("" if error is None or math.isnan(error) else f" ±{100 * error:.1f}")


def points(value: float, sign: bool = False) -> str:
    """Format a difference of fractions in percentage points, without the unit."""
    return (f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}").replace("-", "−")


def format_rounds(count: int) -> str:
    return f"{count} round{'s' * (count != 1)}"


def format_bytes(count: float) -> str:
    """Format bytes with three digits, in the largest unit that keeps the number above 1 (1 MB is a million bytes).

    >>> format_bytes(3_501_200)
    '3.50 MB'
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def listed(names: Iterable[str]) -> str:
    """Join names with commas and a final "and"."""
    found = list(names)
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)


def format_missing(label: str, missing: Mapping[int, str], seeds: Sequence[int]) -> str:
    """Explain why a method is not ranked.

    >>> format_missing("fedbn †", {1: "no run"}, [0])
    'fedbn † is not ranked, because it has no result for seed 1: no run. Its numbers are of seed 0.'
    """
    by_reason: dict[str, list[int]] = {}
    for seed, reason in missing.items():
        by_reason.setdefault(reason.rstrip("."), []).append(seed)
    lacking = "; ".join(f"{_format_seeds(found)}: {reason}" for reason, found in by_reason.items())
    numbers = f"of {_format_seeds(seeds)}" if seeds else "intermediate"
    return f"{label} is not ranked, because it has no result for {lacking}. Its numbers are {numbers}."


def _format_seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {listed(map(str, seeds))}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def json_values(tree: Any) -> Any:
    """Return the tree with NaN and infinite numbers as None, so that JSON can represent it.

    >>> json_values({"mean": float("nan"), "seeds": (0, 1)})
    {'mean': None, 'seeds': [0, 1]}
    """
    if isinstance(tree, Mapping):
        return {str(key): json_values(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [json_values(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
