"""How run folders are called, and where a run's files are: absolute paths, replaced where they lie elsewhere on this machine."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.code_gate import allow, code_in
from polyfed.data.own_data import is_own_data
from polyfed.data.registry import data_sets
from polyfed.errors import SettingError
from polyfed.models.model_text import with_absolute_weights
from polyfed.runs.assemble import reads_files
from polyfed.settings import Settings
from polyfed.text import read_call, write_call

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
        data=settings.data if "data" in given else anchored_data(settings.data),
        root=None if settings.root is None else absolute(settings.root),
        init=None if settings.init is None else absolute(settings.init),
        load=tuple(absolute(file) for file in settings.load),
        model=None if settings.model is None else with_absolute_weights(settings.model),
    )


def anchored_data(text: str) -> str:
    """A folder of images, or a data set whose text names one, by its absolute path."""
    if is_own_data(text):
        return absolute(text)
    root = data_sets.options_in(text).get("root")
    return text if not isinstance(root, str) or absolute(root) == root else with_root(text, root)


def with_root(data: str, root: str) -> str:
    """The text of a data set with another folder in it."""
    return write_call(read_call(data).name, data_sets.options_in(data) | {"root": absolute(root)})


def relocated(settings: Settings, root: str) -> Settings:
    """The settings of a run whose data lie elsewhere: a folder of images, or the files of a data set by name."""
    if is_path(settings.data):
        return dataclasses.replace(settings, data=absolute(root))
    if "root" in data_sets.options_in(settings.data):
        return dataclasses.replace(settings, data=with_root(settings.data, root))
    if not reads_files(settings.data):
        raise SettingError(f"{settings.data.split('(')[0]} is read from no folder, so --root has nothing to say. Leave it out.")
    return dataclasses.replace(settings, root=absolute(root))


def absolute(path: str) -> str:
    """A path that means the same from every folder."""
    return os.path.abspath(os.path.expanduser(path))


def is_path(data: str) -> bool:
    """Whether the data of a written run are a folder, not a data set by name."""
    return os.path.isabs(data)


def on_this_machine(
    settings: Settings,
    root: str | None = None,
    device: str | None = None,
    load: Sequence[str] | None = None,
    model: Any = None,
) -> Settings:
    """The settings of a run with what lies elsewhere on this machine, or is another device; None: as the run has it.

    Args:
        settings: of the run.
        root: the folder of the data set's files; where the data are a folder of images, that folder.
        device: where models are computed.
        load: the files of methods.
        model: the model, where it is named again; one that is no text is not of the settings.
    """
    allow(code_in(load or (), model if isinstance(model, str) else None))
    changes: dict[str, Any] = {}
    if root is not None:
        settings = relocated(settings, root)
    if device is not None:
        changes["device"] = device
    if load is not None:
        changes["load"] = tuple(absolute(file) for file in load)
    if isinstance(model, str):
        changes["model"] = model
    return dataclasses.replace(settings, **changes)
