"""The user's own images with masks: folders ``images/`` and ``masks/``, by domain or for one domain only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from polyfed.core.data_types import DataSet
from polyfed.core.tasks.known import SEGMENTATION
from polyfed.core.tasks.segmentation import IGNORED
from polyfed.data.archives import FolderTree, contents
from polyfed.data.augment import preparation as prepared_as
from polyfed.data.domain_files import source_text
from polyfed.data.images import is_image
from polyfed.data.mask_files import MaskFiles, mask_image, pair_augmentation
from polyfed.data.registry import data_sets
from polyfed.data.splits import Splits, check_share, stratified
from polyfed.errors import DataError, OptionError

IMAGES, MASKS = "images", "masks"
LAYOUT = "folders images/ and masks/"
CLASS_FILE = "classes.txt"
USUAL_TEST_SHARE = 0.2
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
    test_share: float = USUAL_TEST_SHARE,
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
    tree = FolderTree(folder)
    domains = pairs_by_domain(tree, folder)
    classes, meaning, notes = classes_of(folder, tree, domains, ignore)
    split = partial(by_share, test_share, validation_share, seed)
    sources = [MaskFiles(name, LAYOUT, tree, pairs, (height, width), meaning, split) for name, pairs in sorted(domains.items())]
    loaded = tuple(source.load() for source in sources)
    base = prepared_as(normalise, "none")
    preparation = type(base)(base.mean, base.std, augment_pairs=pair_augmentation(crop, flip))
    return DataSet(
        name=folder.resolve().name,
        classes=classes,
        domains=loaded,
        preparation=preparation,
        default_model=SEGMENTATION.default_model,
        source=source_text(sources, loaded, f"{width}x{height} pixels", f"seed {seed}"),
        task=SEGMENTATION,
        notes=notes,
    )


def pairs_by_domain(tree: FolderTree, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Image and mask of each example by domain; one without the other is refused by name."""
    domains, alone = files_by_domain(tree, folder)
    if alone:
        other = MASKS if IMAGES in PurePosixPath(alone[0]).parts else IMAGES
        raise DataError(
            f"{folder}: {alone[0]} has nothing of its name in {other}/ ({len(alone)} such files). "
            "Every image needs a mask of the same name."
        )
    return domains


def files_by_domain(tree: FolderTree, folder: Path) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """Image and mask of each example by domain, and the files that have no other half."""
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
    alone = [
        found[kind][key]
        for kind, other in ((IMAGES, MASKS), (MASKS, IMAGES))
        for key in sorted(found[kind].keys() - found[other].keys())
    ]
    domains: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(found[IMAGES].keys() & found[MASKS].keys()):
        domains.setdefault(key[0], []).append((found[IMAGES][key], found[MASKS][key]))
    return domains, alone


def class_names(folder: Path) -> tuple[str, ...]:
    """The classes that ``classes.txt`` names; none where there is no such file."""
    listed = folder / CLASS_FILE
    return tuple(line.strip() for line in listed.read_text().splitlines() if line.strip()) if listed.is_file() else ()


def classes_of(
    folder: Path, tree: FolderTree, domains: Mapping[str, Sequence[tuple[str, str]]], ignore: int
) -> tuple[tuple[str, ...], dict[int, int], tuple[str, ...]]:
    """The names of the classes, the class of each value in the masks, and what users should know of them."""
    values: set[int] = set()
    for pairs in domains.values():
        for _, mask in pairs:
            pixels: NDArray[np.uint8] = np.asarray(mask_image(tree.read(mask), mask))
            values |= set(np.unique(pixels).tolist())
    if values == {0, 255} and ignore == IGNORED:
        meaning = {0: 0, 255: 1}
    else:
        meaning = {value: value for value in range(max(values - {ignore}, default=0) + 1) if value != ignore}
    names = class_names(folder)
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


def by_share(test_share: float, validation_share: float, seed: int, pairs: Sequence[tuple[str, str]]) -> Splits:
    """The rows of each split, drawn by the seed."""
    rest, test = stratified(np.zeros(len(pairs), np.int64), test_share, seed)
    rest = np.sort(rest)
    train, validation = stratified(np.zeros(len(rest), np.int64), validation_share / (1 - test_share), seed)
    found = {"train": np.sort(rest[train]), "test": test}
    return {**found, "validation": rest[validation]} if len(validation) else found


data_sets.add(mask_folder)
