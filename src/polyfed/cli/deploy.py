"""``polyfed deploy``: a Flower app folder for a recipe."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polyfed.cli.help import Group
from polyfed.cli.options import argument, chosen_settings, example_text, shared
from polyfed.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.settings import Settings


@click.group("deploy", cls=Group)
def deploy() -> None:
    """Run a recipe between machines, over Flower."""


@deploy.command("init", epilog=example_text("polyfed deploy init trial/app --recipe demo --set rounds=5"))
@argument("folder", "DIR", "Folder of the Flower app; made if it does not exist.")
@click.option("--recipe", metavar="FILE|NAME", required=True, help="Recipe (polyfed ls recipes), or the run.toml of a run.")
@shared("set", "trust")
def init(folder: str, recipe: str, changes: Sequence[str], trust: bool) -> None:
    """Write a ready Flower app folder for a recipe; a file that exists is left as it is."""
    from polyfed.flower.app import write_app

    for file in write_app(Path(folder), runnable_settings(recipe, changes, trust), recipe):
        print(file)
        if file.suffix == ".py":
            print(f"  SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}: nodes run this file only if they list it.")
    print("docs/own-superlink.md has the commands that start the server, the nodes and the run.")


def runnable_settings(recipe: str, changes: Sequence[str], trust: bool) -> Settings:
    """Return the settings of a recipe; say now what server and nodes would only say when they start."""
    from polyfed.runs.training_settings import with_declared_by_name
    from polyfed.studies.compare.recipes.checks import problems_of

    settings = with_declared_by_name(chosen_settings(None, {}, changes, recipe, trust))
    if problems := problems_of(settings):
        raise SettingError(f"{recipe}: {' '.join(problems)}")
    return settings
