"""Where a run's files are: written so that any folder may be the working folder, and replaced where they lie elsewhere."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any

from polyfed.core.code_gate import allow, code_in
from polyfed.data.own.own_data import is_own_data
from polyfed.data.registry import data_sets
from polyfed.errors import SettingError
from polyfed.models.model_text import with_absolute_weights
from polyfed.runs.assemble import reads_files
from polyfed.settings import Settings
from polyfed.text import Option, read_call, write_call


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
    root = options_of(text).get("root")
    return text if not isinstance(root, str) or absolute(root) == root else with_root(text, root)


def options_of(data: str) -> dict[str, Option]:
    """The options in the text of a data set, by their names; none where it is no data set by name."""
    return data_sets.options_in(data)


def with_root(data: str, root: str) -> str:
    """The text of a data set with another folder in it."""
    return write_call(read_call(data).name, options_of(data) | {"root": absolute(root)})


def relocated(settings: Settings, root: str) -> Settings:
    """The settings of a run whose data lie elsewhere: a folder of images, or the files of a data set by name."""
    if is_path(settings.data):
        return dataclasses.replace(settings, data=absolute(root))
    if "root" in options_of(settings.data):
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
