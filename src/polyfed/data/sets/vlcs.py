"""VLCS: five classes from four collections of photographs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from polyfed.core.data_types import TrainsWith
from polyfed.data.declaration import Declaration, SplitCounts, augment_option, normalise_option, registered, size_option
from polyfed.data.formats.class_folders import find_class_folders, plain, split_in_turn
from polyfed.data.store.domain_files import DomainFiles

CLASSES = ("bird", "car", "chair", "dog", "person")
DOMAINS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
DOMAIN_FOLDERS = {**{plain(name): name for name in DOMAINS}, "caltech": "Caltech101", "sun": "SUN09", "pascal": "VOC2007"}

FOLDER = "folder VLCS/<domain>/<class>/* (as in DomainBed's archive)"
ARCHIVE = "archive VLCS.tar.gz, VLCS.tar or VLCS.zip of the same folders"
PACKED = "packed vlcs_mini96.tar (187 images of three domains, 96 pixels, to try the loader)"
PACKED_FILE = "vlcs_mini96.tar"
SPLIT = "stratified 90/10 with seed 0"
MINI_SPLIT = "stratified 70/30 with seed 0"
PLACES = {
    FOLDER: ("VLCS", "vlcs", ""),
    ARCHIVE: ("VLCS.tar.gz", "VLCS.tar", "VLCS.zip"),
    PACKED: (PACKED_FILE, "vlcs_mini"),
}
SIZES: Mapping[str, SplitCounts] = {
    domain: {"all": count} for domain, count in zip(DOMAINS, (1_415, 2_656, 3_282, 3_376), strict=True)
}
MINI_SIZES: Mapping[str, SplitCounts] = {
    "Caltech101": {"all": (9, 20, 6, 11, 9)},
    "LabelMe": {"all": (50, 14, 7, 6, 0)},
    "SUN09": {"all": (8, 9, 4, 19, 15)},
}


def find(root: Path, size: int, with_test: bool = True) -> list[DomainFiles]:
    """Return the four domains below a folder, or the three of the packed sample."""
    folders = find_class_folders(root, PLACES, DOMAIN_FOLDERS, {name: name for name in CLASSES})
    if folders is None:
        return []
    packed = folders.layout == PACKED
    return folders.domain_files(
        CLASSES,
        {domain: {} for domain in (MINI_SIZES if packed else DOMAINS)},
        origins=("", MINI_SPLIT if packed else SPLIT),
        data_set="vlcs",
        size=size,
        split=partial(split_in_turn, 0.3 if packed else 0.1, with_test),
        gaps={"LabelMe": ["person"]} if packed else {},
    )


VLCS = Declaration(
    name="vlcs",
    about="""VLCS: five classes from Caltech-101, LabelMe, SUN09 and PASCAL VOC 2007.

    A stratified split with seed 0 uses 90 % of each domain for training (70 % of the packed sample, which has 187 images and no
    VOC2007). The rest is assigned alternately to validation and test, class by class. With ``--unseen-part all``, a held-out domain
    is tested on all of its images.
    """,
    title="VLCS",
    domains=DOMAINS,
    classes=CLASSES,
    splits="stratified 90/10 with seed 0 (packed sample: 70/30)",
    terms="none stated in the sources",
    citation="Fang et al. 2013",
    layouts=(FOLDER, ARCHIVE, PACKED),
    packed_sha256={PACKED_FILE: "09a45f9fb9e2ba88d2c386405c7aa06f92acfd871f67257a3681a05a3c0a22dc"},
    expected={
        **{f"{layout}, {SPLIT}": SIZES for layout in (FOLDER, ARCHIVE)},
        f"{PACKED}, {MINI_SPLIT}": MINI_SIZES,
    },
    default_model="hfedf_cnn",
    trains_with=TrainsWith(lr=0.002),
    options=(
        size_option(64, "Side of the images; 32 for hFedF. Packed images have 96."),
        augment_option(
            "flip", 'Augmentation of training batches: "domainbed" (hFedF follows DomainBed); "flip" is polyfed\'s default.'
        ),
        normalise_option("imagenet"),
    ),
    page="DomainBed's download script (https://github.com/facebookresearch/DomainBed): VLCS.tar.gz (packed or unpacked)",
    find=find,
    check_with={"with_test": False},
)

vlcs = registered(VLCS)
