"""The Flower app of a run: its configuration, and the folder that ``flwr run`` packs and sends to the SuperLink.

The folder holds no code of polyfed: server and nodes run the apps that come with polyfed, which must be installed on every machine.
The settings travel as JSON text in the run's configuration, under ``polyfed-settings``. Method files (``load``) are copied into the
folder, hence travel too; Flower puts the folder on ``sys.path`` where it runs.
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
    """What the run's configuration says beside the settings; its keys have hyphens."""

    out: str = ""  # run folder on the server (empty: a new one); a run that is in it is gone on with
    min_nodes: float = 2  # how many nodes the run waits for
    wait: float = 600.0  # seconds that it waits for them at most
    timeout: float = 3600.0  # seconds a node may take to answer
    patience: float = 120.0  # seconds a node that has gone is waited for
    # At the end, ask the nodes once for the layers that stayed local, and leave the newcomer's model in the run folder. Only on request:
    # whoever chose a method that keeps layers local did not expect them to leave.
    newcomer_model: bool = False
    describe_timeout: float = 300.0  # seconds a node may take to describe itself; it reads its data first
    unseen_data: str = ""  # a folder or data set on the server, on whose domains the newcomer's model is tested

    @classmethod
    def read(cls, config: Mapping[str, object]) -> RunConfig:
        values: dict[str, Any] = {}
        for key, default in DEFAULTS.items():
            value = config.get(key, default)
            if isinstance(default, bool):
                if not isinstance(value, bool):
                    raise SettingError(f"{key} in the run's configuration takes true or false, found {value!r}.")
            elif isinstance(default, str):
                value = str(value)
            elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise SettingError(f"{key} in the run's configuration takes a number of at least 0, found {value!r}.")
            values[key.replace("-", "_")] = value
        return cls(**values)


DEFAULTS: Mapping[str, str | int | float] = {name.replace("_", "-"): value for name, value in vars(RunConfig()).items()}


def settings_text(settings: Settings) -> str:
    """Settings as JSON text; every setting is written, so that no default of another version of polyfed slips in."""
    return json.dumps(dict.fromkeys(FACTS) | settings.to_dict(), sort_keys=True)


def settings_from(run_config: Mapping[str, Any]) -> Settings:
    """Settings from a run's configuration, where server or node runs."""
    text = run_config.get(SETTINGS_KEY)
    if not isinstance(text, str):
        raise SettingError(
            f"The run's configuration has no {SETTINGS_KEY}. Make the app folder with: polyfed deploy init DIR --recipe NAME"
        )
    try:
        settings = read_settings(text)
    except json.JSONDecodeError as error:
        raise SettingError(f"{SETTINGS_KEY} in the run's configuration is not JSON: {error}.") from error
    settings = dataclasses.replace(settings, load=tuple(map(_arrived, settings.load)))
    return settings.trusted()


def read_settings(text: str) -> Settings:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise SettingError(f"{SETTINGS_KEY} in the run's configuration is not a table of settings.")
    settings = Settings.from_dict(values)
    # Whoever may start a run sends an app, whose code Flower runs anyway; what the app names needs no other leave.
    return settings.trusted()


def _arrived(name: str) -> str:
    """Where a file of the app folder lies on this machine."""
    for place in sys.path:
        if (Path(place) / name).is_file():
            return str(Path(place) / name)
    raise SettingError(
        f"The app folder that arrived here holds no {name}. Make it again with: polyfed deploy init DIR --recipe NAME"
    )


SERVER_APP, CLIENT_APP = "polyfed.flower.server_app:app", "polyfed.flower.client_app:app"
PROJECT, RECIPE = "pyproject.toml", "recipe.toml"
ALWAYS_WRITTEN = ("data", "method", "rounds", "lr", "optimizer", "batch_size")
LONGEST_NAME = 32
# Flower leaves files of these names out of what it sends.
NEVER_SENT = re.compile(r"test_.*\.py|.*_test\.py")


def write_app(folder: Path, settings: Settings, name: str, server_app: str = SERVER_APP) -> list[Path]:
    """Write the app folder of a recipe with this name, and return the files written; nothing that exists is overwritten."""
    own = _own_files(settings.load)
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file. Name a folder.")
    if found := [name for name in (PROJECT, RECIPE, *own) if (folder / name).exists()]:
        raise SettingError(f"{folder} already holds {', '.join(found)}, and nothing is overwritten. Name another folder.")
    travelling = dataclasses.replace(settings, load=tuple(own))
    texts = {PROJECT: _project_text(travelling, name, server_app), RECIPE: _recipe_text(travelling, name)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        for file, source in own.items():
            shutil.copyfile(source, folder / file)
    except OSError as error:
        raise SettingError(f"Cannot write to {folder}: {error.strerror or error}. Name another place.") from error
    return [folder / file for file in (*texts, *own)]


def _own_files(load: Sequence[str]) -> dict[str, Path]:
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


def _project_text(settings: Settings, name: str, server_app: str) -> str:
    """``pyproject.toml`` as Flower wants it. polyfed is no dependency: Flower would try to install it for each run."""
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
    """The settings that are not at their defaults as a recipe, to read, and to make the folder again from."""
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
    """A name Flower takes for an app.

    >>> _app_name("fedwon/table-1-digits-fedbn"), _app_name("./My recipe.toml")
    ('table-1-digits-fedbn', 'my-recipe')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", Path(name).name.removesuffix(".toml").lower()).strip("-")
    return plain[:LONGEST_NAME].strip("-") or "polyfed-app"
