"""``polyfed cp``: a recipe of polyfed's own, copied for the user to change."""

from __future__ import annotations

from typing import Annotated

import typer

from polyfed.cli.completion import complete
from polyfed.recipes import command_of, copy

EXAMPLE = "Examples:\n\npolyfed cp demo\n\npolyfed cp digits-five/30-rounds-fedbn my_recipe.toml"


def cp(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe (polyfed ls recipes).", autocompletion=complete("recipes"))],
    destination: Annotated[
        str | None, typer.Argument(metavar="DEST", help="File or folder; default: the last part of the name, here.")
    ] = None,
) -> None:
    """Copy a recipe that comes with polyfed, to change it; a file that exists is left as it is."""
    made = copy(name, destination)
    print(f"{made} is yours. Run it with: {command_of(made.read_text(encoding='utf-8'))}")
