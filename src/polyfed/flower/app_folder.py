"""A ready Flower app folder for a recipe: what ``flwr run`` packs and sends to the SuperLink.

The folder holds no code of its own: server and nodes run the apps that come with polyfed, which must be installed on every machine.
The settings travel as JSON text in the run's configuration, under ``polyfed-settings``. Files of methods of one's own (``load``)
are copied into the folder, hence travel too; Flower puts the folder on ``sys.path`` where it runs.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from polyfed.errors import SettingError
from polyfed.flower.run_config import DEFAULTS, SETTINGS_KEY, settings_text
from polyfed.settings import Settings

SERVER_APP, CLIENT_APP = "polyfed.flower.server_app:app", "polyfed.flower.client_app:app"
PROJECT, RECIPE = "pyproject.toml", "recipe.toml"
ALWAYS_WRITTEN = ("data", "method", "rounds", "lr", "optimizer", "batch_size")
LONGEST_NAME = 32
# Flower leaves files of these names out of what it sends.
NEVER_SENT = re.compile(r"test_.*\.py|.*_test\.py")


def write_app(folder: Path, settings: Settings, name: str, server_app: str = SERVER_APP) -> list[Path]:
    """Write the app folder; nothing that exists is overwritten.

    Args:
        folder: made if it does not exist.
        settings: of the run.
        name: what the recipe is called.
        server_app: the ServerApp that runs it.

    Returns:
        The files written.
    """
    own = own_files(settings.load)
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file. Name a folder.")
    if found := [name for name in (PROJECT, RECIPE, *own) if (folder / name).exists()]:
        raise SettingError(f"{folder} already holds {', '.join(found)}, and nothing is overwritten. Name another folder.")
    travelling = dataclasses.replace(settings, load=tuple(own))
    texts = {PROJECT: project_text(travelling, name, server_app), RECIPE: recipe_text(travelling, name)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        for file, source in own.items():
            shutil.copyfile(source, folder / file)
    except OSError as error:
        raise SettingError(f"Cannot write to {folder}: {error.strerror or error}. Name another place.") from error
    return [folder / file for file in (*texts, *own)]


def own_files(load: Sequence[str]) -> dict[str, Path]:
    """Files of methods of one's own, by the name they travel under."""
    found: dict[str, Path] = {}
    for text in load:
        file = Path(text)
        if not file.is_file():
            raise SettingError(f"There is no file {text} to load methods from.")
        if file.suffix != ".py" or NEVER_SENT.fullmatch(file.name):
            raise SettingError(f"Flower would not send {file.name} to the nodes. Give it a name like my_method.py.")
        if file.name in found:
            raise SettingError(f"Two files to load are called {file.name}. Give one of them another name.")
        found[file.name] = file
    return found


def project_text(settings: Settings, name: str, server_app: str = SERVER_APP) -> str:
    """``pyproject.toml`` as Flower wants it. polyfed is no dependency: Flower would try to install it for each run."""
    document = {
        "project": {
            "name": app_name(name),
            "version": "1.0.0",
            "description": f"polyfed over Flower: {name}",
            "license": "Apache-2.0",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "polyfed",
                    "components": {"serverapp": server_app, "clientapp": CLIENT_APP},
                    "config": {SETTINGS_KEY: settings_text(settings), **DEFAULTS},
                }
            }
        },
    }
    return tomli_w.dumps(document)


def recipe_text(settings: Settings, name: str) -> str:
    """The settings that are not at their defaults as a recipe, to read, and to make the folder again from."""
    plain = {item.name: item.default for item in dataclasses.fields(Settings) if item.name not in ALWAYS_WRITTEN}
    written = {key: value for key, value in dataclasses.asdict(settings).items() if key not in plain or value != plain[key]}
    if settings.total_epochs is not None:
        written.pop("rounds")
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in written.items()}
    document = {"title": f"{name}, as deployed", "settings": values}
    return f"# polyfed run --recipe {RECIPE}\n" + tomli_w.dumps(document)


def app_name(name: str) -> str:
    """A name Flower takes for an app.

    >>> app_name("fedwon/table-1-digits-fedbn"), app_name("./My recipe.toml")
    ('table-1-digits-fedbn', 'my-recipe')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", Path(name).name.removesuffix(".toml").lower()).strip("-")
    return plain[:LONGEST_NAME].strip("-") or "polyfed-app"
