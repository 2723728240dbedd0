"""What a run's configuration may say beside the settings; ``flwr run --run-config`` changes only keys that the app folder has."""

from __future__ import annotations

from collections.abc import Mapping

from polyfed.errors import SettingError

OUT, MIN_NODES, WAIT, TIMEOUT, PATIENCE, NEWCOMER = "out", "min-nodes", "wait", "timeout", "patience", "newcomer-model"
DEFAULTS: Mapping[str, str | int | float] = {
    OUT: "",
    MIN_NODES: 2,
    WAIT: 600.0,
    TIMEOUT: 3600.0,
    PATIENCE: 120.0,
    NEWCOMER: False,
}
"""``out``: run folder on the server (empty: a new one); a run that is in it is gone on with. ``min-nodes``: how many nodes the run waits
for, ``wait`` seconds at most. ``timeout``: seconds a node may take to answer. ``patience``: seconds a node that has gone is waited for.
``newcomer-model``: at the end, ask the nodes once for the layers that stayed local, and leave the newcomer's model in the run folder.
Not unless it is said: who chose a method that keeps layers local did not expect them to leave."""


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
