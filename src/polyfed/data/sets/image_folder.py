"""The user's own images in any folder ``root/<domain>/<class>/*``: ``image_folder(root="my_images", size=96)``.

A plain path works too, with the defaults: ``polyfed run ./my_images``. Classes and domains are those of the folder, so this is
a function of its own and no ``Declaration``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyfed.core.data_types import DataSet, Domain
from polyfed.data.archives import FolderTree, contents
from polyfed.data.augment import preparation
from polyfed.data.cache import Arrays
from polyfed.data.domain_files import DomainFiles, source_text
from polyfed.data.images import IMAGE_SUFFIXES, decode_all, is_image
from polyfed.data.registry import data_sets
from polyfed.data.splits import Splits, check_share, stratified
from polyfed.errors import DataError, OptionError

LAYOUT = "folder <domain>/<class>/*"
SPLIT_LAYOUT = "folders train/<domain>/<class>/* and test/<domain>/<class>/*"
SPLIT_FOLDERS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}
TRAIN, VALIDATION, TEST = 0, 1, 2
SPLIT_NUMBERS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
NAMED_SKIPS = 5

ClassFiles = dict[str, list[tuple[str, int]]]
"""Files of each class with the number of the split they lie in."""


def image_folder(
    root: str,
    size: int = 64,
    test_share: float = 0.2,
    validation_share: float = 0.1,
    seed: int = 0,
    skip_unreadable: bool = False,
    augment: str = "none",
    normalise: str = "half",
) -> DataSet:
    """The user's own images in ``root/<domain>/<class>/*`` (jpg, png, bmp, gif, webp, tif).

    Classes are the union of all class folders; every domain needs every class. If there are ``root/train`` and
    ``root/test`` with domains in them, they are the splits (and ``root/validation``, if there, a third); otherwise
    each domain is split by class, from the sorted file names and the seed alone. Images are resized to a
    square, whatever their aspect ratio; of a moving image the first frame counts.

    Args:
        root: The folder.
        size: Side of the images.
        test_share: Share of each domain for testing, if there is no test folder.
        validation_share: Share of each domain for validation, if there is no validation folder.
        seed: Decides the split.
        skip_unreadable: Leave unreadable images out and say how many, instead of refusing the folder.
        augment: Augmentation of training batches.
        normalise: Normalisation.
    """
    _check_options(size, test_share, validation_share, seed)
    prepared = preparation(normalise, augment)
    folder = Path(root).expanduser()
    pre_split, files = _found(folder)
    classes = _complete(folder, files)
    split = partial(_by_folder, validation_share, seed) if pre_split else partial(_by_share, test_share, validation_share, seed)
    tree = FolderTree(folder)
    sources = [
        _domain_files(tree, domain, files[domain], classes, size, SPLIT_LAYOUT if pre_split else LAYOUT, split, skip_unreadable)
        for domain in sorted(files)
    ]
    domains = tuple(source.load() for source in sources)
    for domain in domains:
        _usable(folder, domain, classes)
    return DataSet(
        name=folder.resolve().name,
        classes=classes,
        domains=domains,
        preparation=prepared,
        default_model="small_cnn",
        source=source_text(
            sources, domains, f"{size}x{size} pixels", f"seed {seed}", _skipped(sources, files) if skip_unreadable else ""
        ),
    )


def _check_options(size: int, test_share: float, validation_share: float, seed: int) -> None:
    check_share("image_folder", "test_share", test_share)
    check_share("image_folder", "validation_share", validation_share)
    if size < 1 or seed < 0 or test_share + validation_share >= 1:
        raise OptionError(
            f"image_folder: size is {size}, seed {seed} and the shares {test_share} and {validation_share}; "
            "the size must be at least 1, the seed 0 or larger, and the shares must leave something to train on."
        )


def _found(root: Path) -> tuple[bool, dict[str, ClassFiles]]:
    """Whether the folder is split already, and the files by domain and class."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder of images: {contents(root)}. Expected <domain>/<class>/<image> in it.")
    pre_split = all((root / split).is_dir() and _has_class_folders(root / split) for split in ("train", "test"))
    files: dict[str, ClassFiles] = {}
    for name in FolderTree(root).names:
        parts = name.split("/")
        if not is_image(name) or len(parts) != (4 if pre_split else 3):
            continue
        split = SPLIT_FOLDERS.get(parts[0]) if pre_split else "train"
        if split is not None:
            files.setdefault(parts[-3], {}).setdefault(parts[-2], []).append((name, SPLIT_NUMBERS[split]))
    if not files:
        endings = ", ".join(suffix[1:] for suffix in IMAGE_SUFFIXES)
        raise DataError(f"{root} holds no images in <domain>/<class>/: {contents(root)}. Images end in {endings}.")
    return pre_split, files


def _has_class_folders(split: Path) -> bool:
    """A domain called train would hold images two levels down; a split called train holds folders there."""
    return any(inner.is_dir() for domain in split.iterdir() if domain.is_dir() for inner in domain.iterdir())


def _complete(root: Path, files: dict[str, ClassFiles]) -> tuple[str, ...]:
    """The classes, after every domain was seen to have training images of each."""
    classes = sorted({label for by_class in files.values() for label in by_class})
    for domain, by_class in sorted(files.items()):
        trainable = {label for label, entries in by_class.items() if any(split == TRAIN for _, split in entries)}
        lacking = [label for label in classes if label not in trainable]
        if lacking:
            raise DataError(
                f"{root}: the domain {domain} has no training images of the class {', '.join(lacking)}; "
                f"it has {', '.join(sorted(trainable)) or 'none'}. Every domain needs a folder with images for each of the classes "
                f"{', '.join(classes)}: add {lacking[0]} to {domain}, or take the class out of the other domains."
            )
    if len(classes) < 2:
        raise DataError(f"{root} has one class only, {classes[0]}. Expected <domain>/<class>/<image> with at least two classes.")
    return tuple(classes)


def _usable(root: Path, domain: Domain, classes: Sequence[str]) -> None:
    """Refuse a domain without test images, or one that lost a class with its unreadable images."""
    left = set(domain.train.labels.tolist())
    lost = [name for label, name in enumerate(classes) if label not in left]
    if lost:
        raise DataError(f"{root}: no image of the class {', '.join(lost)} of the domain {domain.name} can be read. Replace them.")
    if not len(domain.test):
        raise DataError(f"{root}: the domain {domain.name} has no images for testing. Add images, or set test_share above 0.")


def _domain_files(
    tree: FolderTree,
    domain: str,
    files: ClassFiles,
    classes: Sequence[str],
    size: int,
    layout: str,
    split: partial[Splits],
    skip: bool,
) -> DomainFiles:
    entries = [(name, label, place) for label, name_of in enumerate(classes) for name, place in sorted(files[name_of])]
    names = [name for name, _, _ in entries]
    labels, places = (np.array([entry[column] for entry in entries], np.int64) for column in (1, 2))
    return DomainFiles(
        domain=domain,
        layout=layout,
        recipe={"set": "image_folder", "size": size, "classes": list(classes)},
        files=tree.identity(names),
        read=partial(_read, tree, names, labels, places, size),
        split=split,
        skip_unreadable=skip,
        advice=' To leave them out, write the data as: image_folder(root="FOLDER", skip_unreadable=True).',
    )


def _read(
    tree: FolderTree, names: list[str], labels: NDArray[np.int64], places: NDArray[np.int64], size: int, unreadable: list[str]
) -> Arrays:
    x, readable = decode_all(tree, names, size, unreadable)
    return {"x": x, "y": labels[readable], "place": places[readable], "kept": readable}


def _by_share(test_share: float, validation_share: float, seed: int, arrays: Arrays) -> Splits:
    rest, test = stratified(arrays["y"], test_share, seed)
    rest = np.sort(rest)
    train, validation = stratified(arrays["y"][rest], validation_share / (1 - test_share), seed)
    return {"train": np.sort(rest[train]), "validation": rest[validation], "test": test}


def _by_folder(validation_share: float, seed: int, arrays: Arrays) -> Splits:
    train, validation, test = (np.flatnonzero(arrays["place"] == place) for place in (TRAIN, VALIDATION, TEST))
    if not len(validation):
        rest, taken = stratified(arrays["y"][train], validation_share, seed)
        train, validation = np.sort(train[rest]), train[taken]
    return {"train": train, "validation": validation, "test": test}


def _skipped(sources: Sequence[DomainFiles], files: dict[str, ClassFiles]) -> str:
    """How many images were left out, and the first of them by name."""
    names = []
    for source in sources:
        by_class = files[source.domain]
        in_order = [name for label in sorted(by_class) for name, _ in sorted(by_class[label])]
        readable = set(source.arrays()["kept"].tolist())
        names += [name for position, name in enumerate(in_order) if position not in readable]
    if not names:
        return "no unreadable image"
    more = f" and {len(names) - NAMED_SKIPS} more" if len(names) > NAMED_SKIPS else ""
    return f"{len(names)} unreadable image{'s' if len(names) != 1 else ''} skipped: {', '.join(names[:NAMED_SKIPS])}{more}"


data_sets.add(image_folder)
