"""``polyfed deploy``: files for a custom Flower deployment."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polyfed.cli.help import Group
from polyfed.cli.options import argument, example_text, resolve_settings, shared
from polyfed.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.settings import Settings


@click.group("deploy", cls=Group)
def deploy() -> None:
    """Create files for your own Flower deployment."""


@deploy.command("init", epilog=example_text("polyfed deploy init trial/app --recipe demo --set rounds=5"))
@argument("folder", "DIR", "Folder for the Flower app.")
@click.option(
    "--recipe", metavar="FILE|NAME", required=True, help="Recipe name (polyfed ls recipes), recipe file, or run.toml of a run."
)
@shared("set", "trust")
def init(folder: str, recipe: str, changes: Sequence[str], trust: bool) -> None:
    """Create a Flower app folder for a recipe. Existing files are not overwritten."""
    from polyfed.flower.app import write_app

    for file in write_app(Path(folder), runnable_settings(recipe, changes, trust), recipe):
        print(file)
        if file.suffix == ".py":
            print(f"  SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}: nodes run this file only if they list it.")
    print("To start the server, the nodes and the run, see docs/own-superlink.md.")


def runnable_settings(recipe: str, changes: Sequence[str], trust: bool) -> Settings:
    """Return the settings of a recipe, checked for problems that would otherwise appear when the server or a node starts."""
    from polyfed.runs.training_defaults import with_declared_by_name
    from polyfed.studies.compare.recipes.checks import problems_of

    settings = with_declared_by_name(resolve_settings(None, {}, changes, recipe, trust))
    if problems := problems_of(settings):
        raise SettingError(f"{recipe}: {' '.join(problems)}")
    return settings
