"""``polyfed deploy``: a Flower app folder for a recipe."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli.options import Changes, Trust, chosen_settings
from polyfed.errors import MissingExtra, SettingError

if TYPE_CHECKING:
    from polyfed.settings import Settings

INIT_EXAMPLE = "Example: polyfed deploy init trial/app --recipe demo --set rounds=5"

deploy_app = typer.Typer(help="Run a recipe between machines, over Flower.", no_args_is_help=True)


@deploy_app.command("init", epilog=INIT_EXAMPLE)
def init(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of the Flower app; made if it does not exist.")],
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="FILE|NAME", help="Recipe (polyfed ls recipes), or the run.toml of a run.")
    ],
    changes: Changes = None,
    trust: Trust = False,
) -> None:
    """Write a ready Flower app folder for a recipe; a file that exists is left as it is."""
    needs_flower()
    from polyfed.flower.app import write_app
    from polyfed.runs.training_defaults import with_declared_by_name

    settings = with_declared_by_name(chosen_settings(None, {}, changes, recipe, trust=trust))
    refuse_what_cannot_run(settings, recipe)
    for file in write_app(Path(folder), settings, recipe):
        print(file)
        if file.suffix == ".py":
            print(f"  SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}: nodes run this file only if they list it.")
    print("docs/own-superlink.md has the commands that start the server, the nodes and the run.")


def needs_flower() -> None:
    """Refuse where Flower is not installed."""
    if find_spec("flwr") is None:
        raise MissingExtra("Deployment needs Flower. Install it with: pip install 'polyfed[flower]'")


def refuse_what_cannot_run(settings: Settings, recipe: str) -> None:
    """Say now what server and nodes would only say when they start."""
    from polyfed.studies.compare.recipes.checks import problems_of

    if problems := problems_of(settings):
        raise SettingError(f"{recipe}: {' '.join(problems)}")
