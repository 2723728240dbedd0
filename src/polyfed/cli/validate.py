"""``polyfed validate``: everything that is wrong with recipes, before anything is trained."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from polyfed.cli.completion import complete
from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.options import Json, Trust
from polyfed.cli.output import busy, print_json
from polyfed.errors import SettingError

EXAMPLE = "Examples:\n\npolyfed validate my_recipe.toml\n\npolyfed validate recipes/*.toml --json"


def validate(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Recipes: files, or names of polyfed's own.", autocompletion=complete("recipes")),
    ],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check recipes without data and without training; all errors are said at once."""
    from polyfed.recipes.checks import problems_with

    found: dict[str, list[str]] = {}
    for file in files:
        with busy(f"Checking {file}", as_json):
            try:
                found[file] = [str(problem) for problem in problems_with(file, trust)]
            except SettingError as error:
                found[file] = [str(error)]
    if as_json:
        print_json({"files": [{"file": file, "ok": not problems, "problems": problems} for file, problems in found.items()]})
    else:
        for file, problems in found.items():
            for problem in problems:
                print(f"{file}: {problem}", file=sys.stderr)
            if not problems:
                print(f"{file}: ok")
    if any(found.values()):
        raise typer.Exit(BAD_INPUT)
