"""PACS: seven classes as art paintings, cartoons, photographs and sketches."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from polyfed.core.data_types import TrainsWith
from polyfed.data.declaration import Declaration, SplitCounts, augment_option, normalise_option, registered, size_option
from polyfed.data.formats.class_folders import find_class_folders, plain, split_in_turn, tail
from polyfed.data.store.archives import FileTree, FolderTree, existing_trees
from polyfed.data.store.domain_files import DomainFiles

CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")

FOLDER = "folder PACS/<domain>/<class>/* (or kfold/, as in the authors' and DomainBed's archives)"
PACKED = "packed pacs96.tar (227 to 96 pixels)"
ARCHIVE = "archive PACS.zip, PACS.tar or PACS.tar.gz of the same folders"
LISTS, NO_LISTS = "official lists", "stratified 90/10 with seed 0"
PACKED_FILE = "pacs96.tar"
PLACES = {
    FOLDER: ("PACS", "PACS/kfold", "kfold", "pacs", ""),
    ARCHIVE: ("PACS.zip", "PACS.tar", "PACS.tar.gz"),
    PACKED: (PACKED_FILE,),
}
LIST_ARCHIVES = ("pacs_splits.tar.gz", "PACS/pacs_splits.tar.gz")
LIST_FOLDERS = ("", "pacs_splits", "splits", "PACS", "PACS/pacs_splits", "PACS/splits")

SIZES: Mapping[str, SplitCounts] = {
    "art_painting": {"all": (379, 255, 285, 184, 201, 295, 449)},
    "cartoon": {"all": (389, 457, 346, 135, 324, 288, 405)},
    "photo": {"all": (189, 202, 182, 186, 199, 280, 432)},
    "sketch": {"all": (772, 740, 753, 608, 816, 80, 160)},
}
LIST_SIZES = {"art_painting": (1840, 208), "cartoon": (2107, 237), "photo": (1499, 171), "sketch": (3531, 398)}
EXPECTED_WITH_LISTS: Mapping[str, SplitCounts] = {
    domain: {**SIZES[domain], "train": train, "validation": crossval} for domain, (train, crossval) in LIST_SIZES.items()
}


def find(root: Path, size: int, with_test: bool = True) -> list[DomainFiles]:
    """Return the four domains below a folder. Crossval is split into validation and test, unless ``with_test`` is False."""
    folders = find_class_folders(root, PLACES, {plain(name): name for name in DOMAINS}, {name: name for name in CLASSES})
    if folders is None:
        return []
    lists = {domain: _lists(root, folders.tree, domain) for domain in DOMAINS}
    return folders.domain_files(
        CLASSES, lists, origins=(LISTS, NO_LISTS), data_set="pacs", size=size, split=partial(split_in_turn, 0.1, with_test)
    )


def _lists(root: Path, images: FileTree, domain: str) -> dict[str, list[str]]:
    """Return the files in the lists of a domain, or nothing if a list is missing. The labels in the lists are not used."""
    found = {}
    archives = [tree for tree in (*existing_trees(root, LIST_ARCHIVES), images) if tree.path.is_file()]
    for kind in ("train", "crossval"):
        file = f"{domain}_{kind}_kfold.txt"
        folders = [root / place for place in LIST_FOLDERS if (root / place / file).is_file()]
        members = [(tree, name) for tree in archives for name in tree.names if name.split("/")[-1] == file]
        if not folders and not members:
            return {}
        content = FolderTree(folders[0]).read(file) if folders else members[0][0].read(members[0][1])
        lines = content.decode("utf-8", errors="replace").splitlines()
        found[kind] = [tail(line.rsplit(maxsplit=1)[0]) for line in lines if line.strip()]
    return found


PACS = Declaration(
    name="pacs",
    about="""PACS: seven classes as art paintings, cartoons, photographs and sketches.

    The authors' lists split each domain about 90/10 into train and crossval. Without them, a stratified 90/10 split with seed 0 is
    used. Crossval is assigned alternately to validation and test, class by class. The image that the lists contain twice is used
    once, and the image that they omit is added to crossval. The test list contains the whole domain, including training images,
    so it suits only a held-out domain: ``--unseen-part all`` tests such a domain on all of its images.
    """,
    title="PACS",
    domains=DOMAINS,
    classes=CLASSES,
    splits="the authors' lists (train, crossval), or stratified 90/10 with seed 0 without them",
    terms="none stated in the sources",
    citation="Li et al. 2017",
    layouts=(
        FOLDER,
        ARCHIVE,
        PACKED,
        "with pacs_splits.tar.gz, or *_train_kfold.txt and *_crossval_kfold.txt, for the official lists",
    ),
    packed_sha256={
        PACKED_FILE: "cc791ec0fd547315cb85217ceca222e52b7ce43e6ac40b03b40ffb3b17fd2af9",
        "pacs_splits.tar.gz": "2c334a4a744b4e44471b37c849db39cf06216f2b8495fd640f4e3e873530109d",
    },
    expected={
        f"{layout}, {split}": expected for layout in PLACES for split, expected in ((LISTS, EXPECTED_WITH_LISTS), (NO_LISTS, SIZES))
    },
    default_model="hfedf_cnn",
    trains_with=TrainsWith(lr=0.002),
    options=(
        size_option(96, "Side of the images: 32 for hFedF, 224 for gPerXAN. Packed images have 96."),
        augment_option(
            "flip",
            'Augmentation of training batches: "domainbed" (hFedF follows DomainBed), "flip_jitter" (gPerXAN); "flip" is polyfed\'s default.',
        ),
        normalise_option("half", 'Normalisation: "imagenet" (DomainBed, hFedF, gPerXAN); "half" is polyfed\'s default.'),
    ),
    page="https://www.kaggle.com/datasets/nickfratto/pacs-dataset or DomainBed's download script: PACS/<domain>/<class>/*",
    find=find,
    check_with={"with_test": False},
)

pacs = registered(PACS)
