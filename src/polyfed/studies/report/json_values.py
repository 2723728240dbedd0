"""Values as JSON can hold them. Apart, so that the command line can use it without importing torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def json_values(tree: Any) -> Any:
    """The tree as JSON can hold it: what is not a finite number is null.

    >>> json_values({"mean": float("nan"), "seeds": (0, 1)})
    {'mean': None, 'seeds': [0, 1]}
    """
    if isinstance(tree, Mapping):
        return {str(key): json_values(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [json_values(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
