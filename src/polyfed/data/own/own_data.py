"""Data of the user's own by their path alone: a folder of images, or a table that lists them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from polyfed.core.data_types import DataSet
from polyfed.data.own import huggingface, image_folder, manifest, mask_folder
from polyfed.data.own.own_images import OwnImages
from polyfed.data.registry import data_sets


def is_own_data(text: str) -> bool:
    """Return True if a text is the path of data; in case of doubt a known name wins, and ./NAME is the path."""
    return (os.path.isdir(text) and ("/" in text or text not in data_sets)) or _is_table(text)


def _is_table(text: str) -> bool:
    return text.lower().endswith(manifest.SUFFIXES) and os.path.isfile(os.path.expanduser(text))


def own_data(path: str, **options: Any) -> DataSet:
    """Read the data of a folder, a table or a Hugging Face copy; a folder with ``images/`` and ``masks/`` is for segmentation."""
    return _reader(path)[0](path, **options)


def options_of_own_data(path: str) -> Collection[str]:
    """Return the names of the options that data of this kind has."""
    return inspect.signature(_reader(path)[0]).parameters


def own_images(path: str) -> OwnImages:
    """Return the images of a folder or a table, not decoded yet."""
    return _reader(path)[1](Path(path).expanduser())


def _reader(path: str) -> tuple[Callable[..., DataSet], Callable[[Path], OwnImages]]:
    """Return the function that reads the data, and the one that finds the images."""
    if mask_folder.holds_masks(path):
        return mask_folder.mask_folder, mask_folder.found_in
    if huggingface.holds_copy(path):
        return huggingface.huggingface, huggingface.copied_in
    if _is_table(path):
        return manifest.manifest, manifest.listed_in
    return image_folder.image_folder, image_folder.found_in
