"""Settings from a recipe, by its file or by the name of a shipped one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyfed.studies.compare.recipes import read, trust_of
from polyfed.trust import Trust


def recipe_values(text: str, trust: bool = False) -> tuple[Mapping[str, Any], Trust]:
    """The settings a recipe names: its table ``[settings]``, as in a ``run.toml``; and what of the code in them may be run.

    Args:
        text: A file, or the name of a recipe of polyfed's own.
        trust: Let the code it names be run.
    """
    values = read(text).values
    return values, trust_of(text, values, trust)


def recipe_methods(text: str) -> Mapping[str, Mapping[str, Any]]:
    """The methods of a recipe's table ``[methods]``, each with the settings of its own."""
    return read(text).methods
