"""Formulas of layers, written out number by number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def listing_by_hand(weight: np.ndarray[Any, Any], gain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Filter by filter, number by number."""
    out = np.empty_like(weight)
    for index, row in enumerate(weight.reshape(len(weight), -1)):
        n = len(row)
        mean = math.fsum(row) / n
        variance = math.fsum((value - mean) ** 2 for value in row) / (n - 1)
        scale = 1 / math.sqrt(max(variance * n, 1e-4))
        out[index] = (weight[index] - mean) * scale * gain[index]
    return out


def factor_by_hand(values: Array) -> float:
    """Written with r = |mean| / std of the entries, a form that shares no step with the code."""
    count, spread = len(values), float(np.std(values))
    if count <= 2 or spread == 0:
        return 1.0
    return 1 - ((count - 2) / count) / (1 + (float(np.mean(values)) / spread) ** 2)
