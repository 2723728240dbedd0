"""PACS: seven classes as art paintings, cartoons, photographs and sketches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from polyfed.data.archives import FileTree, FolderTree, existing_trees
from polyfed.data.augment import preparation
from polyfed.data.cache import Arrays
from polyfed.data.classfolders import ClassFolders, ImageList, class_folders, plain, tail
from polyfed.data.federation import DataSet, data_sets
from polyfed.data.parts import Counts, Facts, Part, Splits, domains_of, source_of
from polyfed.data.splits import Positions, stratified
from polyfed.errors import OptionError

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")

FOLDER = "folder PACS/<domain>/<class>/* (or kfold/, as in the authors' and DomainBed's archives)"
PACKED = "packed pacs96.tar (227 to 96 pixels)"
ARCHIVE = "archive PACS.zip, PACS.tar or PACS.tar.gz of the same folders"
LISTS, NO_LISTS = "official lists", "stratified 90/10 with seed 0"
FOLDERS = ("PACS", "PACS/kfold", "kfold", "pacs", "")
ARCHIVES = ("PACS.zip", "PACS.tar", "PACS.tar.gz")
PACKED_FILE = "pacs96.tar"
LIST_ARCHIVES = ("pacs_splits.tar.gz", "PACS/pacs_splits.tar.gz")
LIST_FOLDERS = ("", "pacs_splits", "splits", "PACS", "PACS/pacs_splits", "PACS/splits")

SIZES: Mapping[str, Counts] = {
    "art_painting": {"all": (379, 255, 285, 184, 201, 295, 449)},
    "cartoon": {"all": (389, 457, 346, 135, 324, 288, 405)},
    "photo": {"all": (189, 202, 182, 186, 199, 280, 432)},
    "sketch": {"all": (772, 740, 753, 608, 816, 80, 160)},
}
LIST_SIZES = {"art_painting": (1840, 208), "cartoon": (2107, 237), "photo": (1499, 171), "sketch": (3531, 398)}
EXPECTED_WITH_LISTS: Mapping[str, Counts] = {
    domain: {**SIZES[domain], "train": train, "validation": held} for domain, (train, held) in LIST_SIZES.items()
}


def pacs(root: str, size: int = 96, augment: str = "flip", normalise: str = "half") -> DataSet:
    """PACS: seven classes as art paintings, cartoons, photographs and sketches.

    The authors' lists part each domain about 90/10 into train and crossval; without them a stratified 90/10
    split with seed 0 takes their place. Crossval is dealt in turn, class by class, to validation and test, so that
    no image is in two parts; the one image the lists name twice counts once, and the one they forget joins crossval.
    The lists' test part is the whole domain, training images included. It fits only a domain nobody trains on, which
    ``--unseen-part all`` tests on all its images.

    Args:
        root: Folder of the files.
        size: Side of the images: 32 for hFedF, 224 for gPerXAN; the packed images have 96.
        augment: Augmentation of training batches.
        normalise: "half" (hFedF) or "imagenet" (gPerXAN).
    """
    if size < 1:
        raise OptionError(f"pacs: size is {size}; it must be at least 1.")
    prepared = preparation(normalise, augment)
    parts = find(Path(root).expanduser(), size, with_test=True)
    domains = domains_of(parts)
    return DataSet(
        name="PACS",
        classes=CLASSES,
        domains=domains,
        preparation=prepared,
        default_model="hfedf_cnn",
        source=source_of(parts, domains, f"{size}x{size} pixels"),
    )


def find(root: Path, size: int = 96, with_test: bool = False) -> list[Part]:
    """The four domains under a folder, parted as the lists have it, or with crossval dealt to validation and test."""
    layout, found = _located(root)
    parts = []
    for domain in DOMAINS:
        images = found.image_list(domain, CLASSES)
        named = _lists(root, found.tree, domain)
        parts.append(
            Part(
                domain=domain,
                layout=f"{layout}, {LISTS if named else NO_LISTS}",
                recipe={"set": "pacs", "size": size},
                files=images.tree.identity(images.names),
                read=partial(images.read, size),
                split=partial(_split, images, named, with_test),
                problems=(*found.problems(domain, CLASSES), *images.missing(named)),
            )
        )
    return parts


def _located(root: Path) -> tuple[str, ClassFolders]:
    domains, classes = {plain(name): name for name in DOMAINS}, {name: name for name in CLASSES}
    for layout, places in ((FOLDER, FOLDERS), (ARCHIVE, ARCHIVES), (PACKED, (PACKED_FILE,))):
        for tree in existing_trees(root, places):
            if tree.path.is_dir() and not any((tree.path / domain).is_dir() for domain in DOMAINS):
                continue
            found = class_folders(tree, domains, classes)
            if found is not None:
                return layout, found
    raise FACTS.nothing_in(root)


def _lists(root: Path, images: FileTree, domain: str) -> dict[str, list[str]]:
    """The files each list of a domain names, or nothing if a list is missing. The labels in them are not trusted."""
    found = {}
    archives = [tree for tree in (*existing_trees(root, LIST_ARCHIVES), images) if tree.path.is_file()]
    for kind in ("train", "crossval"):
        file = f"{domain}_{kind}_kfold.txt"
        folders = [root / place for place in LIST_FOLDERS if (root / place / file).is_file()]
        held = [(tree, name) for tree in archives for name in tree.names if name.split("/")[-1] == file]
        if not folders and not held:
            return {}
        content = FolderTree(folders[0]).read(file) if folders else held[0][0].read(held[0][1])
        lines = content.decode("utf-8", errors="replace").splitlines()
        found[kind] = [tail(line.rsplit(maxsplit=1)[0]) for line in lines if line.strip()]
    return found


def _split(images: ImageList, named: Mapping[str, list[str]], with_test: bool, arrays: Arrays) -> Splits:
    y = arrays["y"]
    if not named:
        train, held = stratified(y, 0.1, seed=0)
    else:
        train, held = (images.rows(named[kind], arrays) for kind in ("train", "crossval"))
    if not with_test:
        return {"train": train, "validation": held}
    held = np.setdiff1d(np.arange(len(y)), train)
    return {"train": train, **_dealt(held, y)}


def _dealt(held: Positions, labels: Positions) -> dict[str, Positions]:
    """Class by class in turn to validation and test."""
    by_class = held[np.argsort(labels[held], kind="stable")]
    return {"validation": np.sort(by_class[0::2]), "test": np.sort(by_class[1::2])}


FACTS = Facts(
    title="PACS",
    domains=DOMAINS,
    classes=CLASSES,
    splits="the authors' lists (train, crossval) where they are, else stratified 90/10 with seed 0",
    terms="none stated in the sources",
    cite="Li et al. 2017",
    layouts=(
        FOLDER,
        ARCHIVE,
        PACKED,
        "with pacs_splits.tar.gz, or *_train_kfold.txt and *_crossval_kfold.txt, for the official lists",
    ),
    packed={
        "pacs96.tar": "cc791ec0fd547315cb85217ceca222e52b7ce43e6ac40b03b40ffb3b17fd2af9",
        "pacs_splits.tar.gz": "2c334a4a744b4e44471b37c849db39cf06216f2b8495fd640f4e3e873530109d",
    },
    expected={
        f"{layout}, {split}": expected
        for layout in (FOLDER, ARCHIVE, PACKED)
        for split, expected in ((LISTS, EXPECTED_WITH_LISTS), (NO_LISTS, SIZES))
    },
    find=find,
)

data_sets.add(pacs, facts=FACTS)
