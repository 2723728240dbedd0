"""The Flower app of a run: its configuration, and the folder that ``flwr run`` packs and sends to the SuperLink.

The folder contains no polyfed code: server and nodes run the apps of their installed polyfed. The settings are sent as JSON in the run
configuration, under ``polyfed-settings``. Method files (``load``) are copied into the folder and sent with it. Flower adds the folder to
``sys.path``.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.errors import SettingError
from polyfed.settings import FACTS, Settings

SETTINGS_KEY = "polyfed-settings"

OUT, MIN_NODES, NEWCOMER = "out", "min-nodes", "newcomer-model"


@dataclass(frozen=True)
class RunConfig:
    """The run configuration besides the settings. Its keys are written with hyphens."""

    out: str = ""  # run folder on the server (empty: a new one); an existing run is resumed
    min_nodes: float = 2  # number of nodes to wait for
    wait: float = 600.0  # maximum seconds to wait for them
    timeout: float = 3600.0  # seconds a node may take to reply
    patience: float = 120.0  # seconds to wait for a disconnected node
    # Request the local layers from the nodes once, at the end, and save the newcomer model in the run folder. Off by default: users of
    # a method that keeps layers local do not expect them to leave the nodes.
    newcomer_model: bool = False
    describe_timeout: float = 300.0  # seconds a node may take to describe itself; it reads its data first
    unseen_data: str = ""  # folder or data set on the server whose domains test the newcomer model

    @classmethod
    def read(cls, config: Mapping[str, object]) -> RunConfig:
        values: dict[str, Any] = {}
        for key, default in DEFAULTS.items():
            value = config.get(key, default)
            if isinstance(default, bool):
                if not isinstance(value, bool):
                    raise SettingError(f"{key} in the run configuration must be true or false, got {value!r}.")
            elif isinstance(default, str):
                value = str(value)
            elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise SettingError(f"{key} in the run configuration must be a number of at least 0, got {value!r}.")
            values[key.replace("-", "_")] = value
        return cls(**values)


DEFAULTS: Mapping[str, str | int | float] = {name.replace("_", "-"): value for name, value in vars(RunConfig()).items()}


def settings_text(settings: Settings) -> str:
    """Return all settings as JSON, including defaults, which may differ in another version of polyfed."""
    return json.dumps(dict.fromkeys(FACTS) | settings.to_dict(), sort_keys=True)


def settings_from(run_config: Mapping[str, Any]) -> Settings:
    """Read the settings from a run configuration and locate the method files of the app on this machine."""
    text = run_config.get(SETTINGS_KEY)
    if not isinstance(text, str):
        raise SettingError(
            f"The run configuration has no {SETTINGS_KEY}. Create the app folder with: polyfed deploy init DIR --recipe NAME"
        )
    try:
        settings = read_settings(text)
    except json.JSONDecodeError as error:
        raise SettingError(f"{SETTINGS_KEY} in the run configuration is not JSON: {error}.") from error
    return dataclasses.replace(settings, load=tuple(map(_received_file, settings.load))).trusted()


def read_settings(text: str) -> Settings:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise SettingError(f"{SETTINGS_KEY} in the run configuration is not a table of settings.")
    # Anyone who may start a run sends an app whose code Flower runs, so code named by the app needs no further permission.
    return Settings.from_dict(values).trusted()


def _received_file(name: str) -> str:
    for place in sys.path:
        if (Path(place) / name).is_file():
            return str(Path(place) / name)
    raise SettingError(f"The app folder received here has no {name}. Recreate it with: polyfed deploy init DIR --recipe NAME")


SERVER_APP, CLIENT_APP = "polyfed.flower.server_app:app", "polyfed.flower.client_app:app"
PROJECT, RECIPE = "pyproject.toml", "recipe.toml"
ALWAYS_WRITTEN = ("data", "method", "rounds", "lr", "optimizer", "batch_size")
LONGEST_NAME = 32
# Flower does not send files with these names.
NEVER_SENT = re.compile(r"test_.*\.py|.*_test\.py")


def write_app(folder: Path, settings: Settings, name: str, server_app: str = SERVER_APP) -> list[Path]:
    """Write the app folder and return the written files. ``name`` is the recipe name. Existing files are not overwritten."""
    own = _own_files(settings.load)
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file. Pass a folder.")
    if found := [name for name in (PROJECT, RECIPE, *own) if (folder / name).exists()]:
        raise SettingError(f"{folder} already contains {', '.join(found)}, and nothing is overwritten. Choose another folder.")
    travelling = dataclasses.replace(settings, load=tuple(own))
    texts = {PROJECT: _project_text(travelling, name, server_app), RECIPE: _recipe_text(travelling, name)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        for file, source in own.items():
            shutil.copyfile(source, folder / file)
    except OSError as error:
        raise SettingError(f"Cannot write to {folder}: {error.strerror or error}. Choose another folder.") from error
    return [folder / file for file in (*texts, *own)]


def _own_files(load: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in load:
        file = Path(text)
        if not file.is_file():
            raise SettingError(f"Method file not found: {text}.")
        if file.suffix != ".py" or NEVER_SENT.fullmatch(file.name):
            raise SettingError(f"Flower does not send files named {file.name} to nodes. Rename it, for example to my_method.py.")
        if file.name in found:
            raise SettingError(f"Two method files are named {file.name}. Rename one of them.")
        found[file.name] = file
    return found


def _project_text(settings: Settings, name: str, server_app: str) -> str:
    """Return the ``pyproject.toml`` for Flower. It does not list polyfed, because Flower would install it for each run."""
    project = {
        "name": _app_name(name),
        "version": "1.0.0",
        "description": f"polyfed over Flower: {name}",
        "license": "Apache-2.0",
        "dependencies": [],
    }
    app = {
        "publisher": "polyfed",
        "components": {"serverapp": server_app, "clientapp": CLIENT_APP},
        "config": {SETTINGS_KEY: settings_text(settings), **DEFAULTS},
    }
    return tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})


def _recipe_text(settings: Settings, name: str) -> str:
    """Return the settings that differ from their defaults as a recipe, for readers and to recreate the folder."""
    written = {
        key: value
        for key, value in settings.to_dict().items()
        if key in ALWAYS_WRITTEN or getattr(settings, key) != FACTS[key].default
    }
    if settings.total_epochs is not None:
        written.pop("rounds")
    document = {"title": f"{name}, as deployed", "settings": written}
    return f"# polyfed run --recipe {RECIPE}\n" + tomli_w.dumps(document)


def _app_name(name: str) -> str:
    """Return an app name that Flower accepts.

    >>> _app_name("fedwon/table-1-digits-fedbn"), _app_name("./My recipe.toml")
    ('table-1-digits-fedbn', 'my-recipe')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", Path(name).name.removesuffix(".toml").lower()).strip("-")
    return plain[:LONGEST_NAME].strip("-") or "polyfed-app"
