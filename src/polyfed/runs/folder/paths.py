"""How run folders are called, and where a run's files are: absolute paths, replaced where they lie elsewhere on this machine."""

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


def anchored(settings: Settings, given: Collection[str] = ()) -> Settings:
    """The settings with every path absolute; names of data sets stay names.

    Args:
        settings: as they were written, with paths from the working folder.
        given: what came as a Python object, and has only its name in the settings.
    """
    return dataclasses.replace(
        settings,
        data=settings.data if "data" in given else _anchored_data(settings.data),
        root=None if settings.root is None else absolute(settings.root),
        init=None if settings.init is None else absolute(settings.init),
        load=tuple(absolute(file) for file in settings.load),
        model=None if settings.model is None else with_absolute_weights(settings.model),
    )


def _anchored_data(text: str) -> str:
    """A folder of images, or a data set whose text names one, by its absolute path."""
    if is_own_data(text):
        return absolute(text)
    root = data_sets.options_in(text).get("root")
    return text if not isinstance(root, str) or absolute(root) == root else _with_root(text, root)


def _with_root(data: str, root: str) -> str:
    """The text of a data set with another folder in it."""
    return write_call(read_call(data).name, data_sets.options_in(data) | {"root": absolute(root)})


def _relocated(settings: Settings, root: str) -> Settings:
    """The settings of a run whose data lie elsewhere: a folder of images, or the files of a data set by name."""
    if is_path(settings.data):
        return dataclasses.replace(settings, data=absolute(root))
    if "root" in data_sets.options_in(settings.data):
        return dataclasses.replace(settings, data=_with_root(settings.data, root))
    if not reads_files(settings.data):
        raise SettingError(f"{settings.data.split('(')[0]} is read from no folder, so --root has nothing to say. Leave it out.")
    return dataclasses.replace(settings, root=absolute(root))


def absolute(path: str) -> str:
    """A path that means the same from every folder."""
    return os.path.abspath(os.path.expanduser(path))


def is_path(data: str) -> bool:
    """Whether the data of a written run are a folder, not a data set by name."""
    return os.path.isabs(data)


@dataclass(frozen=True)
class Reopening:
    """How a run is opened again: what lies elsewhere on this machine, or was given in Python. None: as the run has it.

    Attributes:
        root: The folder of the data set's files; where the data are a folder of images, that folder.
        device: Where models are computed.
        load: The files of methods.
        model: The model, or its name, if the run names a function in a file of somebody else.
        method: The method, where it is a value of Python that is not registered.
        trust: Run the code that the folder names, though this account did not write it.
        trusted: Code that may be run anyway.
        notify: Called with a message for the user.
    """

    root: str | None = None
    device: str | None = None
    load: Sequence[str] | None = None
    model: Any = None
    method: Method | None = None
    trust: bool = False
    trusted: Trust = NOTHING
    notify: Callable[[str], None] = print

    def settings_of(self, folder: RunFolder) -> Settings:
        """The settings of the run on this machine, with the code that may be run."""
        model = self.model if isinstance(self.model, str) else None
        trust = folder.trust(self.trust).adding([*self.trusted.code, *code_in(self.load or (), model)])
        return dataclasses.replace(self.moved(folder.settings_to_go_on()), trust=trust)

    def moved(self, settings: Settings) -> Settings:
        """The settings with what lies elsewhere, or is another device."""
        if self.root is not None:
            settings = _relocated(settings, self.root)
        load = None if self.load is None else tuple(absolute(file) for file in self.load)
        changes: dict[str, Any] = {
            "device": self.device,
            "load": load,
            "model": self.model if isinstance(self.model, str) else None,
        }
        return dataclasses.replace(settings, **{name: value for name, value in changes.items() if value is not None})
