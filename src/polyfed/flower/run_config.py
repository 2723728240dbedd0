"""What a run's configuration says: the settings as text, and some keys that ``flwr run --run-config`` may change."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.code_gate import allow, code_in
from polyfed.errors import SettingError
from polyfed.settings import Settings, with_changes

SETTINGS_KEY = "polyfed-settings"

OUT, MIN_NODES, WAIT, TIMEOUT, PATIENCE, NEWCOMER = "out", "min-nodes", "wait", "timeout", "patience", "newcomer-model"
DESCRIBE_TIMEOUT, UNSEEN_DATA = "describe-timeout", "unseen-data"
DEFAULTS: Mapping[str, str | int | float] = {
    OUT: "",
    MIN_NODES: 2,
    WAIT: 600.0,
    TIMEOUT: 3600.0,
    PATIENCE: 120.0,
    NEWCOMER: False,
    DESCRIBE_TIMEOUT: 300.0,
    UNSEEN_DATA: "",
}
"""``out``: run folder on the server (empty: a new one); a run that is in it is gone on with. ``min-nodes``: how many nodes the run waits
for, ``wait`` seconds at most. ``timeout``: seconds a node may take to answer. ``patience``: seconds a node that has gone is waited for.
``newcomer-model``: at the end, ask the nodes once for the layers that stayed local, and leave the newcomer's model in the run folder.
``describe-timeout``: seconds a node may take to describe itself; it reads its data first. ``unseen-data``: a folder or data set on the
server, on whose domains the newcomer's model is tested. ``newcomer-model`` only on request: whoever chose a method that keeps layers local did not expect them to leave."""


def switch(config: Mapping[str, object], key: str) -> bool:
    """A yes or no of the run's configuration."""
    value = config.get(key, DEFAULTS[key])
    if not isinstance(value, bool):
        raise SettingError(f"{key} in the run's configuration takes true or false, found {value!r}.")
    return value


def number(config: Mapping[str, object], key: str) -> float:
    """A number of the run's configuration."""
    value = config.get(key, DEFAULTS[key])
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise SettingError(f"{key} in the run's configuration takes a number of at least 0, found {value!r}.")
    return float(value)


def settings_text(settings: Settings) -> str:
    """Settings as JSON text; every setting is written, so that no default of another version of polyfed slips in."""
    return json.dumps(dataclasses.asdict(settings), sort_keys=True)


def settings_from(run_config: Mapping[str, Any]) -> Settings:
    """Settings from a run's configuration, where server or node runs.

    Args:
        run_config: ``context.run_config``.
    """
    text = run_config.get(SETTINGS_KEY)
    if not isinstance(text, str):
        raise SettingError(
            f"The run's configuration has no {SETTINGS_KEY}. Make the app folder with: polyfed deploy init DIR --recipe NAME"
        )
    try:
        settings = read_settings(text)
    except json.JSONDecodeError as error:
        raise SettingError(f"{SETTINGS_KEY} in the run's configuration is not JSON: {error}.") from error
    settings = dataclasses.replace(settings, load=tuple(_arrived(file) for file in settings.load))
    allow(code_in(settings.load))
    return settings


def read_settings(text: str) -> Settings:
    """Settings from their JSON text."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise SettingError(f"{SETTINGS_KEY} in the run's configuration is not a table of settings.")
    settings = with_changes(
        Settings(), {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )
    # Whoever may start a run sends an app, whose code Flower runs anyway; what the app names needs no other leave.
    allow(code_in(settings.load, settings.model))
    return settings


def _arrived(name: str) -> str:
    """Where a file of the app folder lies on this machine."""
    for place in sys.path:
        if (Path(place) / name).is_file():
            return str(Path(place) / name)
    raise SettingError(
        f"The app folder that arrived here holds no {name}. Make it again with: polyfed deploy init DIR --recipe NAME"
    )
