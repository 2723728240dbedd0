"""Default names of run folders, and absolute paths of files that a run uses, which may have moved on this machine."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.method import Method
from polyfed.data.own.own_data import is_own_data
from polyfed.data.registry import data_sets
from polyfed.errors import SettingError
from polyfed.models.model_text import with_absolute_weights
from polyfed.runs.assemble import reads_files
from polyfed.settings import Settings
from polyfed.text import read_call, write_call
from polyfed.trust import NOTHING, Trust, code_in

if TYPE_CHECKING:
    from polyfed.runs.folder.run_folder import RunFolder

MAX_SLUG = 60


def slug(text: str) -> str:
    """Convert text to a part of a file name.

    >>> slug("fedbn + agc(clip=1.28)")
    'fedbn-agc-clip-1.28'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:MAX_SLUG].rstrip("-.")


def data_slug(data: str) -> str:
    """Return the name of a data set without its options, or the last component of a folder."""
    return slug(Path(data).resolve().name if is_own_data(data) else data.split("(")[0].replace("_", "-")) or "data"


def default_name(settings: Settings) -> str:
    return f"{data_slug(settings.data)}-{slug(settings.method)}-seed{settings.seed}"


def default_folder(settings: Settings) -> Path:
    return free_folder(Path("runs") / default_name(settings))


def free_folder(wanted: Path) -> Path:
    """Return the folder, with a number appended if it exists."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def anchored(settings: Settings, given: Collection[str] = ()) -> Settings:
    """Return the settings with absolute paths; ``given`` lists settings that only name a Python object."""
    return dataclasses.replace(
        settings,
        data=settings.data if "data" in given else _with_absolute_root(settings.data),
        root=None if settings.root is None else absolute(settings.root),
        init=None if settings.init is None else absolute(settings.init),
        load=tuple(absolute(file) for file in settings.load),
        model=None if settings.model is None else with_absolute_weights(settings.model),
    )


def _with_absolute_root(data: str) -> str:
    if is_own_data(data):
        return absolute(data)
    root = data_sets.options_in(data).get("root")
    return data if not isinstance(root, str) or absolute(root) == root else _with_root(data, root)


def _with_root(data: str, root: str) -> str:
    return write_call(read_call(data).name, data_sets.options_in(data) | {"root": absolute(root)})


def _with_moved_data(settings: Settings, root: str) -> Settings:
    if is_path(settings.data):
        return dataclasses.replace(settings, data=absolute(root))
    if "root" in data_sets.options_in(settings.data):
        return dataclasses.replace(settings, data=_with_root(settings.data, root))
    if not reads_files(settings.data):
        raise SettingError(
            f"--root has no effect: {settings.data.split('(')[0]} does not read files from a folder. Remove the option."
        )
    return dataclasses.replace(settings, root=absolute(root))


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def is_path(data: str) -> bool:
    """Return True if the recorded data of a run is a folder, not the name of a data set."""
    return os.path.isabs(data)


@dataclass(frozen=True)
class Reopening:
    """Options for opening a run: objects given in Python, and differences of this machine. None keeps the recorded value.

    Attributes:
        root: Data set folder or image folder.
        device: Device for computation.
        load: Method files.
        model: Model, or a name that replaces one from a file that this account did not write.
        method: Method, if it is an unregistered Python object.
        trust: Run the code that the folder names, even if another account wrote it.
        trusted: Code that may be run without ``trust``.
        allow_unfinished: Open a run without its final state, because it is unfinished, damaged or diverged.
        notify: Called with messages for the user.
    """

    root: str | None = None
    device: str | None = None
    load: Sequence[str] | None = None
    model: Any = None
    method: Method | None = None
    trust: bool = False
    trusted: Trust = NOTHING
    allow_unfinished: bool = False
    notify: Callable[[str], None] = print

    def settings_of(self, folder: RunFolder) -> Settings:
        """Return the settings of the run on this machine, with the trusted code."""
        model = self.model if isinstance(self.model, str) else None
        trust = folder.trust(self.trust).adding([*self.trusted.code, *code_in(self.load or (), model)])
        return dataclasses.replace(self.moved(folder.resumed_settings()), trust=trust)

    def moved(self, settings: Settings) -> Settings:
        """Return the settings with all differences of this machine."""
        if self.root is not None:
            settings = _with_moved_data(settings, self.root)
        changes: dict[str, Any] = {
            "device": self.device,
            "load": None if self.load is None else tuple(absolute(file) for file in self.load),
            "model": self.model if isinstance(self.model, str) else None,
        }
        return dataclasses.replace(settings, **{name: value for name, value in changes.items() if value is not None})
