"""Open user-supplied data by its path: a folder of images, or a table that lists them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from polyfed.core.data_types import DataSet
from polyfed.data.own import huggingface, image_folder, manifest, mask_folder
from polyfed.data.own.own_images import OPTION_TEXTS, OwnImages, OwnOptions
from polyfed.data.registry import data_sets
from polyfed.text import read_call


def is_own_data(text: str) -> bool:
    """Return True if a text is a path to data. A known name takes precedence over a folder; ./NAME is always a path."""
    return (os.path.isdir(text) and ("/" in text or text not in data_sets)) or _is_table(text)


def _is_table(text: str) -> bool:
    return text.lower().endswith(manifest.SUFFIXES) and os.path.isfile(os.path.expanduser(text))


def own_data(path: str, **options: Any) -> DataSet:
    """Read a folder, a table or a Hugging Face copy. A folder with ``images/`` and ``masks/`` is for segmentation."""
    return _reader(path)[0](path, **options)


def options_of_own_data(path: str) -> Collection[str]:
    """Return the option names for data of this kind."""
    return inspect.signature(_reader(path)[0]).parameters


def own_images(text: str) -> tuple[OwnImages, OwnOptions] | None:
    """Return the images of a folder, a table or an expression that reads one, not decoded yet, with their options. None for other data."""
    if is_own_data(text):
        return _reader(text)[1](Path(text).expanduser()), OwnOptions()
    name = text.split("(")[0].strip()
    record = data_sets.find(name) if name in data_sets else None
    if record is None or "find" not in record.extra or "root" not in data_sets.options_in(text):
        return None
    values = record.bind(read_call(text))
    options = OwnOptions(**{each: values.pop(each) for each in OPTION_TEXTS})  # type: ignore[arg-type]
    options.check(name)
    return record.extra["find"](Path(str(values.pop("root"))).expanduser(), **values), options


def _reader(path: str) -> tuple[Callable[..., DataSet], Callable[..., OwnImages]]:
    if mask_folder.has_masks(path):
        return mask_folder.mask_folder, mask_folder.find
    if huggingface.is_copy(path):
        return huggingface.huggingface, huggingface.find
    if _is_table(path):
        return manifest.manifest, manifest.find
    return image_folder.image_folder, image_folder.find
