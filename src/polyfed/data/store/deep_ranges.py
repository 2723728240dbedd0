"""Black and white points of *deep* images, which have more than 8 bits or are floating-point: one range per domain and number type.

A run records the ranges, so that the same file becomes the same input in training, evaluation and prediction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyfed.core.data_types import DeepRange, DeepRanges
from polyfed.errors import OptionError
from polyfed.settings import AUTO

KINDS = INTEGERS, FLOATS = "integers", "floats"
"""Number types. They are scaled separately, because their values have different units."""
EVERY = "*"
"""Stands for all domains that are not listed."""
SEPARATOR = ".."
Ranges: TypeAlias = Mapping[str, DeepRange]
"""Black and white points by number type."""
DEEP_RANGE = "deep_range"
"""Name of the option, and of the array in the cache."""


def read_option(owner: str, text: str) -> DeepRanges:
    """Return the fixed ranges in the option ``deep_range``; none for ``auto``.

    >>> read_option("image_folder", "0..4095")
    {'*': {'integers': (0.0, 4095.0), 'floats': (0.0, 4095.0)}}
    """
    if text == AUTO:
        return {}
    try:
        if text.startswith("{"):
            return read_ranges(json.loads(text))
        black, white = text.split(SEPARATOR)
        return read_ranges({EVERY: {kind: [float(black), float(white)] for kind in KINDS}})
    except ValueError as error:
        raise OptionError(
            f'{owner}: deep_range must be "auto" or "BLACK{SEPARATOR}WHITE", such as "0..4095", got {text!r}.'
        ) from error


def write_option(ranges: DeepRanges) -> str:
    """Return the option that fixes the ranges of a run for these domains, and for others if all domains share one range."""
    shared = {kind: found.pop() for kind in KINDS if len(found := set(of_kind(ranges, kind).values())) == 1}
    return json.dumps({EVERY: shared, **ranges}) if ranges else AUTO


def read_ranges(value: object) -> DeepRanges:
    """Return recorded ranges by domain; raise a ValueError if they are invalid."""
    if not isinstance(value, dict):
        raise ValueError("the ranges must be a table")
    return {str(domain): _read_kinds(by_kind) for domain, by_kind in value.items()}


def _read_kinds(value: object) -> Ranges:
    if not isinstance(value, dict) or not set(value) <= set(KINDS):
        raise ValueError(f"ranges must be a table of {' and '.join(KINDS)}")
    found = {}
    for kind, limits in value.items():
        if not isinstance(limits, list | tuple) or len(limits) != 2 or not all(isinstance(each, int | float) for each in limits):
            raise ValueError("a range must have a black and a white value")
        black, white = map(float, limits)
        if not (math.isfinite(black) and math.isfinite(white) and black <= white):
            raise ValueError("a range must have two finite values, black first")
        found[kind] = black, white
    return found


def of_domain(ranges: DeepRanges, domain: str) -> Ranges:
    """Return the ranges of a domain by number type."""
    return {**ranges.get(EVERY, {}), **ranges.get(domain, {})}


def of_kind(ranges: DeepRanges, kind: str) -> dict[str, DeepRange]:
    """Return the ranges of one number type by domain."""
    return {domain: by_kind[kind] for domain, by_kind in ranges.items() if kind in by_kind}


def describe_range(limits: DeepRange) -> str:
    return f"{limits[0]:g}{SEPARATOR}{limits[1]:g}"


def range_arrays(ranges: Ranges) -> dict[str, NDArray[np.float64]]:
    """Return the ranges of a domain as an array for the cache, if there are any."""
    return {DEEP_RANGE: np.array([ranges.get(kind, (math.nan, math.nan)) for kind in KINDS])} if ranges else {}


def ranges_in(arrays: Mapping[str, NDArray[Any]]) -> Ranges:
    """Return the ranges in arrays from the cache."""
    values = arrays.get(DEEP_RANGE, np.full((len(KINDS), 2), math.nan))
    return {kind: (float(black), float(white)) for kind, (black, white) in zip(KINDS, values, strict=True) if not math.isnan(black)}
