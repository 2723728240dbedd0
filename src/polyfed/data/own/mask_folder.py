"""Read user-supplied images with masks from folders ``images/`` and ``masks/``, per domain or for a single domain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from polyfed.core.data_types import DataSet
from polyfed.data.augment import pair_augmentation
from polyfed.data.declaration import DataOption, crop_options, described_function, height_option, normalise_option, share_option
from polyfed.data.formats.mask_files import mask_image
from polyfed.data.own.own_images import DEEP_RANGE_TEXT, OwnImage, OwnImages, OwnOptions
from polyfed.data.registry import data_sets
from polyfed.data.store.archives import FolderTree, contents
from polyfed.data.store.domain_files import some_of
from polyfed.data.store.images import is_image
from polyfed.errors import DataError
from polyfed.settings import AUTO
from polyfed.tasks.known import SEGMENTATION
from polyfed.tasks.segmentation import IGNORED

IMAGES, MASKS = "images", "masks"
LAYOUT = "folders images/ and masks/"
CLASS_FILE = "classes.txt"
NAMED_VALUES = 8
OPTIONS = (
    height_option(128, "Height to which images and masks are resized."),
    DataOption("width", 128, "Width to which images and masks are resized."),
    *crop_options(0),
    share_option("test_share", 0.2, "Fraction of each domain used for testing."),
    share_option("validation_share", 0.0, "Fraction of each domain used for validation."),
    DataOption("seed", 0, "Seed of the split."),
    DataOption("ignore", IGNORED, "Value of pixels without a class."),
    normalise_option("half"),
    DataOption("deep_range", AUTO, DEEP_RANGE_TEXT),
)


def has_masks(root: str) -> bool:
    """Return True if a folder, or each of its subfolders, contains ``images/`` and ``masks/``."""
    folder = Path(root).expanduser()
    if (folder / IMAGES).is_dir() and (folder / MASKS).is_dir():
        return True
    inner = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")] if folder.is_dir() else []
    return bool(inner) and all((path / IMAGES).is_dir() and (path / MASKS).is_dir() for path in inner)


def _build(root: str, height: int, width: int, crop: int, flip: bool, ignore: int, **common: Any) -> DataSet:
    options = OwnOptions(size=(height, width), augment_pairs=pair_augmentation(crop, flip), **common)
    options.check("mask_folder")
    folder = Path(root).expanduser()
    images = find(folder)
    if images.problems:
        raise DataError(f"{folder}: {some_of(images.problems)} Every image needs a mask with the same name.")
    names, meaning, notes = _classes(folder, images, ignore)
    return replace(images, outputs=names, meaning=meaning, notes=notes).data_set(options)


def find(folder: Path) -> OwnImages:
    """Return the pairs of images and masks of a folder, not decoded yet. Files without a counterpart are problems."""
    tree = FolderTree(folder)
    found: dict[str, dict[tuple[str, str], str]] = {IMAGES: {}, MASKS: {}}
    for name in tree.names:
        parts = PurePosixPath(name).parts
        kind = next((part for part in parts[:-1] if part in found), None)
        if kind is None or not is_image(name):
            continue
        inner = [part for part in parts[:-1] if part != kind]
        domain = inner[0] if inner else folder.resolve().name
        found[kind][domain, "/".join([*inner[1:], PurePosixPath(name).stem])] = name
    if not found[IMAGES]:
        raise DataError(
            f"{folder} has no images in {IMAGES}/: {contents(folder)}. Expected <domain>/{IMAGES}/* and <domain>/{MASKS}/*."
        )
    names = folder / CLASS_FILE
    return OwnImages(
        root=folder,
        name=folder.resolve().name,
        tree=tree,
        layout=LAYOUT,
        images=[
            OwnImage(found[IMAGES][key], key[0], label="", mask=found[MASKS][key])
            for key in sorted(found[IMAGES].keys() & found[MASKS].keys())
        ],
        classes=("",),
        reader='mask_folder(root="FOLDER"',
        problems=tuple(
            f"{found[kind][key]} has no counterpart in {other}/."
            for kind, other in ((IMAGES, MASKS), (MASKS, IMAGES))
            for key in sorted(found[kind].keys() - found[other].keys())
        ),
        task=SEGMENTATION,
        outputs=tuple(line.strip() for line in names.read_text().splitlines() if line.strip()) if names.is_file() else (),
    )


def _classes(folder: Path, images: OwnImages, ignore: int) -> tuple[tuple[str, ...], dict[int, int], tuple[str, ...]]:
    """Return the class names, the class of each mask value, and notices."""
    values: set[int] = set()
    for image in images.images:
        values |= set(np.unique(np.asarray(mask_image(images.tree.read(image.mask), image.mask))).tolist())
    if values == {0, 255} and ignore == IGNORED:
        meaning = {0: 0, 255: 1}
    else:
        meaning = {value: value for value in range(max(values - {ignore}, default=0) + 1) if value != ignore}
    count, largest = len(images.outputs), max(meaning.values())
    if not count:
        numbered = tuple(str(label) for label in range(largest + 1))
        used = sorted(values & meaning.keys())
        if len(used) == len(numbered):
            return numbered, meaning, ()
        shown = f"{', '.join(map(str, used[:NAMED_VALUES]))}{' ...' * (len(used) > NAMED_VALUES)}"
        note = (
            f"{folder}: the masks contain the values {shown}, which makes {len(numbered)} classes, {len(numbered) - len(used)} of them "
            f"without any pixel. Number the classes without gaps, or list all of them in {CLASS_FILE}."
        )
        return numbered, meaning, (note,)
    if largest >= count:
        raise DataError(
            f"{folder / CLASS_FILE} lists {count} classes, but masks contain the value {largest}. Add the missing classes, or set ignore={largest}."
        )
    return images.outputs, meaning, ()


mask_folder = described_function(
    "mask_folder",
    """Images with masks in ``root/<domain>/images/*`` and ``root/<domain>/masks/*``, or ``root/images/<domain>/*`` and masks.

    An image and its mask have the same file name except for the ending. A mask has one byte per pixel (grey or palette): the
    class of the pixel, starting at 0. ``root/classes.txt`` lists the class names, one per line; without it, classes are
    numbered. Masks that contain only 0 and 255 separate one object class from the background.
    """,
    "The folder.",
    OPTIONS,
    _build,
    find,
)
data_sets.add(mask_folder)
