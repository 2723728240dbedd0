"""How run folders are called."""

from __future__ import annotations

import re
from pathlib import Path

from polyfed.data.own_data import is_own_data
from polyfed.settings import Settings

LONGEST_SLUG = 60


def slug(text: str) -> str:
    """Text as a part of a file's name.

    >>> slug("fedbn + agc(clip=1.28)")
    'fedbn-agc-clip-1.28'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:LONGEST_SLUG].rstrip("-.")


def data_slug(data: str) -> str:
    """The name of a data set without its options, or the last part of a folder."""
    return slug(Path(data).resolve().name if is_own_data(data) else data.split("(")[0].replace("_", "-")) or "data"


def default_name(settings: Settings) -> str:
    """The name of a run folder."""
    return f"{data_slug(settings.data)}-{slug(settings.method)}-seed{settings.seed}"


def default_folder(settings: Settings) -> Path:
    """The folder of a run that was given none."""
    return free_folder(Path("runs") / default_name(settings))


def free_folder(wanted: Path) -> Path:
    """The folder, or the first with a number added that is free."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder
