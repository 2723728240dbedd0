"""The user's own images with masks: folders ``images/`` and ``masks/``, by domain or for one domain only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from polyfed.core.data_types import DataSet
from polyfed.data.augment import pair_augmentation
from polyfed.data.formats.mask_files import mask_image
from polyfed.data.own.own_images import OwnImage, OwnImages, OwnOptions
from polyfed.data.registry import data_sets
from polyfed.data.store.archives import FolderTree, contents
from polyfed.data.store.domain_files import some_of
from polyfed.data.store.images import is_image
from polyfed.data.store.splits import check_share
from polyfed.errors import DataError, OptionError
from polyfed.tasks.known import SEGMENTATION
from polyfed.tasks.segmentation import IGNORED

IMAGES, MASKS = "images", "masks"
LAYOUT = "folders images/ and masks/"
CLASS_FILE = "classes.txt"
NAMED_VALUES = 8


def holds_masks(root: str) -> bool:
    """Whether a folder has ``images/`` and ``masks/``, itself or in each of its domains."""
    folder = Path(root).expanduser()
    if (folder / IMAGES).is_dir() and (folder / MASKS).is_dir():
        return True
    inner = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")] if folder.is_dir() else []
    return bool(inner) and all((path / IMAGES).is_dir() and (path / MASKS).is_dir() for path in inner)


def mask_folder(
    root: str,
    height: int = 128,
    width: int = 128,
    crop: int = 0,
    flip: bool = True,
    test_share: float = 0.2,
    validation_share: float = 0.0,
    seed: int = 0,
    ignore: int = IGNORED,
    normalise: str = "half",
) -> DataSet:
    """The user's own images with masks: ``root/<domain>/images/*`` and ``root/<domain>/masks/*``, or ``root/images/<domain>/*`` and masks.

    An image and its mask have the same name up to the ending. A mask has one byte a pixel (grey, or a palette): the class of the
    pixel, from 0. ``root/classes.txt`` names the classes, one a line; without it they are numbered. Masks of 0 and 255 only are
    those of one thing and its background.

    Args:
        root: The folder.
        height: Height that images and masks are resized to.
        width: Width that images and masks are resized to.
        crop: Side of the random crops in training; 0: whole images.
        flip: Mirror training images and their masks with a chance of one half.
        test_share: Share of each domain for testing.
        validation_share: Share of each domain for validation.
        seed: Decides the split.
        ignore: The value of pixels without a class.
        normalise: Normalisation.
    """
    check_share("mask_folder", "test_share", test_share)
    check_share("mask_folder", "validation_share", validation_share)
    if min(height, width) < 1 or crop < 0 or seed < 0 or test_share + validation_share >= 1:
        raise OptionError(
            f"mask_folder: height is {height}, width {width}, crop {crop}, seed {seed} and the shares {test_share} and {validation_share}; "
            "sides must be at least 1, crop and seed 0 or larger, and the shares must leave something to train on."
        )
    folder = Path(root).expanduser()
    images = found_in(folder)
    if images.problems:
        raise DataError(f"{folder}: {some_of(images.problems)} Every image needs a mask of the same name.")
    names, meaning, notes = _classes(folder, images, ignore)
    options = OwnOptions(
        size=(height, width),
        test_share=test_share,
        validation_share=validation_share,
        seed=seed,
        normalise=normalise,
        augment_pairs=pair_augmentation(crop, flip),
    )
    return replace(images, outputs=names, meaning=meaning, notes=notes).data_set(options)


def found_in(folder: Path) -> OwnImages:
    """Return the images of a folder with their masks, which are not read yet; files without their other half are problems."""
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
            f"{folder} holds no images in {IMAGES}/: {contents(folder)}. Expected <domain>/{IMAGES}/* and <domain>/{MASKS}/*."
        )
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
            f"{found[kind][key]} has nothing of its name in {other}/."
            for kind, other in ((IMAGES, MASKS), (MASKS, IMAGES))
            for key in sorted(found[kind].keys() - found[other].keys())
        ),
        task=SEGMENTATION,
        outputs=_class_names(folder),
    )


def _class_names(folder: Path) -> tuple[str, ...]:
    """The classes that ``classes.txt`` names; none where there is no such file."""
    listed = folder / CLASS_FILE
    return tuple(line.strip() for line in listed.read_text().splitlines() if line.strip()) if listed.is_file() else ()


def _classes(folder: Path, images: OwnImages, ignore: int) -> tuple[tuple[str, ...], dict[int, int], tuple[str, ...]]:
    """Return the names of the classes, the class of each value in the masks, and what users should know of them."""
    values: set[int] = set()
    for image in images.images:
        values |= set(np.unique(np.asarray(mask_image(images.tree.read(image.mask), image.mask))).tolist())
    if values == {0, 255} and ignore == IGNORED:
        meaning = {0: 0, 255: 1}
    else:
        meaning = {value: value for value in range(max(values - {ignore}, default=0) + 1) if value != ignore}
    names = images.outputs
    most = max(meaning.values())
    if not names:
        numbered = tuple(str(label) for label in range(most + 1))
        return numbered, meaning, _gaps(folder, values & meaning.keys(), len(numbered))
    if most >= len(names):
        raise DataError(
            f"{folder / CLASS_FILE} names {len(names)} classes, but masks hold the class {most}. Name it, or give ignore={most}."
        )
    return names, meaning, ()


def _gaps(folder: Path, values: set[int], classes: int) -> tuple[str, ...]:
    """A sentence where values of masks leave numbers out, as shades of grey do."""
    if len(values) == classes:
        return ()
    return (
        f"{folder}: masks hold the values {', '.join(map(str, sorted(values)[:NAMED_VALUES]))}{' ...' * (len(values) > NAMED_VALUES)}, so "
        f"there are {classes} classes from 0 on, of which {classes - len(values)} are never shown. Number the classes without gaps, or name "
        f"them all in {CLASS_FILE}.",
    )


data_sets.add(mask_folder)
