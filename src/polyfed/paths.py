"""Where a run's files are: written down so that any folder may be the working folder, and exchanged where they lie elsewhere."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any

from polyfed.errors import TextError
from polyfed.settings import Settings
from polyfed.text import read_call, write_call


def anchored(settings: Settings, given: Collection[str] = ()) -> Settings:
    """The settings with every path absolute; names of data sets stay names.

    Args:
        settings: as they were written, with paths from the working folder.
        given: what came as a Python object, and is only called as the settings say.
    """
    return dataclasses.replace(
        settings,
        data=settings.data if "data" in given else anchored_data(settings.data),
        root=None if settings.root is None else absolute(settings.root),
        init=None if settings.init is None else absolute(settings.init),
        load=tuple(absolute(file) for file in settings.load),
    )


def anchored_data(text: str) -> str:
    """A folder of images, or a data set whose text names one, by its absolute path."""
    from polyfed.build import is_folder
    from polyfed.data.federation import data_sets

    if is_folder(text):
        return absolute(text)
    try:
        call = read_call(text)
    except TextError:
        return text
    if call.name not in data_sets:
        return text
    options = dict(zip(data_sets.find(call.name).signature.parameters, call.positional, strict=False)) | dict(call.named)
    root = options.get("root")
    if not isinstance(root, str) or absolute(root) == root:
        return text
    return write_call(call.name, options | {"root": absolute(root)})


def absolute(path: str) -> str:
    """A path that means the same from every folder."""
    return os.path.abspath(os.path.expanduser(path))


def is_path(data: str) -> bool:
    """Whether the data of a written run are a folder, not a data set by name."""
    return os.path.isabs(data)


def on_this_machine(
    settings: Settings, root: str | None = None, device: str | None = None, load: Sequence[str] | None = None
) -> Settings:
    """The settings of a run with what lies elsewhere on this machine, or is another device; None: as the run has it.

    Args:
        settings: of the run.
        root: the folder of the data set's files; where the data are a folder of images, that folder.
        device: where models are computed.
        load: the files of methods.
    """
    changes: dict[str, Any] = {}
    if root is not None:
        changes["data" if is_path(settings.data) else "root"] = absolute(root)
    if device is not None:
        changes["device"] = device
    if load is not None:
        changes["load"] = tuple(absolute(file) for file in load)
    return dataclasses.replace(settings, **changes)
