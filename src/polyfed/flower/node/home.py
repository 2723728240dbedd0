"""The folder in which a node keeps its state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home_of(config: Mapping[str, object]) -> Path:
    """The folder for a node's state: what its configuration says, or the user's folder for state."""
    folder = config.get("state")
    return Path(str(folder)).expanduser() if folder else default_home()


def default_home() -> Path:
    """Where nodes keep their state by default."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "polyfed" / "nodes"
