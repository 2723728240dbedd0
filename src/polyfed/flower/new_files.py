"""Writing files that must be new: the app folder of a run, certificates and keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyfed.errors import SettingError


def refuse_existing(folder: Path, names: Sequence[str], advice: str) -> None:
    """Refuse a folder that is a file, or that has one of these files already; ``advice`` says what would work."""
    if folder.exists() and not folder.is_dir():
        raise SettingError(f"{folder} is a file. Name a folder.")
    found = [name for name in names if (folder / name).exists()]
    if found:
        raise SettingError(f"{folder} already holds {', '.join(found)}, and {advice}")


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn a failure to write into a sentence."""
    try:
        yield
    except OSError as error:
        raise SettingError(f"Cannot write to {folder}: {error.strerror or error}. Name another place.") from error
