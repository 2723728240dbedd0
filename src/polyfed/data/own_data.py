"""Data of the user's own by their path alone: a folder of images, or a table that lists them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from polyfed.core.data_types import DataSet
from polyfed.data.own_images import OwnImages
from polyfed.data.registry import data_sets
from polyfed.data.sets import huggingface, image_folder, manifest, mask_folder


def is_own_data(text: str) -> bool:
    """Whether a text is the path of data; in case of doubt a known name wins, and ./NAME is the path."""
    return (os.path.isdir(text) and ("/" in text or text not in data_sets)) or is_table(text)


def is_table(text: str) -> bool:
    """Whether a text is the path of a table of images."""
    return text.lower().endswith(manifest.SUFFIXES) and os.path.isfile(os.path.expanduser(text))


def own_data(path: str, **options: Any) -> DataSet:
    """The data of a folder, a table or a Hugging Face copy; a folder with ``images/`` and ``masks/`` is for segmentation."""
    return _reader(path)(path, **options)


def options_of_own_data(path: str) -> Collection[str]:
    """The names of the options that data of this kind have."""
    return inspect.signature(_reader(path)).parameters


def _reader(path: str) -> Callable[..., DataSet]:
    if os.path.isdir(path) and mask_folder.holds_masks(path):
        return mask_folder.mask_folder
    if huggingface.holds_copy(path):
        return huggingface.huggingface
    return manifest.manifest if is_table(path) else image_folder.image_folder


def own_images(path: str) -> OwnImages:
    """The images of a folder or a table, not decoded yet."""
    place = Path(path).expanduser()
    if huggingface.holds_copy(place):
        return huggingface.copied_in(place)
    return manifest.listed_in(place) if is_table(path) else image_folder.found_in(place)
