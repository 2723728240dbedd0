"""Settings from a recipe file, or from the ``run.toml`` of another run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from polyfed.errors import SettingError


def recipe_values(file: str) -> dict[str, Any]:
    """The settings a recipe names: its table ``[settings]``, as in a ``run.toml``.

    Args:
        file: The recipe.
    """
    path = Path(file)
    if not path.is_file():
        raise SettingError(f"--recipe: there is no file {file}.")
    try:
        document = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingError(f"--recipe: {file} cannot be read: {error}.") from error
    values = document.get("settings")
    if not isinstance(values, dict):
        raise SettingError(f"--recipe: {file} has no table [settings]; write settings there, such as rounds = 20.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
