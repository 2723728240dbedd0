"""Settings from a recipe, by its file or by the name of a shipped one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyfed.recipes import read


def recipe_values(text: str) -> Mapping[str, Any]:
    """The settings a recipe names: its table ``[settings]``, as in a ``run.toml``.

    Args:
        text: A file, or the name of a recipe of polyfed's own.
    """
    return read(text).values
