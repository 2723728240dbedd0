"""Settings from a recipe, by its file or by the name of a shipped one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyfed.studies.compare.recipes import name_code, read


def recipe_values(text: str, trust: bool = False) -> Mapping[str, Any]:
    """The settings a recipe names: its table ``[settings]``, as in a ``run.toml``.

    Args:
        text: A file, or the name of a recipe of polyfed's own.
        trust: Let the code it names be run.
    """
    values = read(text).values
    name_code(text, values, trust)
    return values


def recipe_methods(text: str) -> Mapping[str, Mapping[str, Any]]:
    """The methods of a recipe's table ``[methods]``, each with the settings of its own."""
    return read(text).methods
