"""Folders of a node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home_of(config: Mapping[str, object]) -> Path:
    """The folder for a node's state: what its configuration says, or the user's folder for state."""
    told = config.get("state")
    return Path(str(told)).expanduser() if told else default_home()


def default_home() -> Path:
    """Where nodes keep their state unless they are told."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "polyfed" / "nodes"
