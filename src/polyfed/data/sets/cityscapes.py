"""Cityscapes: street scenes of 21 cities segmented into 19 classes, with one domain per city."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polyfed.core.data_types import TrainsWith
from polyfed.data.declaration import Declaration, crop_options, height_option, normalise_option, registered
from polyfed.data.formats.mask_files import Pairs, mask_files, pairs_by_domain
from polyfed.data.store.archives import FileTree, existing_trees, joined_archives
from polyfed.data.store.domain_files import DomainFiles
from polyfed.data.store.splits import Splits
from polyfed.tasks.known import SEGMENTATION

CLASSES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain"),
    *("sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
CLASS_OF_ID = {
    value: label for label, value in enumerate((7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33))
}
"""Train ids of the authors by the values of ``*_labelIds.png``. Other values are ignored in training and scores."""
# fmt: off
TRAINING = {
    "aachen": 174, "bochum": 96, "bremen": 316, "cologne": 154, "darmstadt": 85, "dusseldorf": 221, "erfurt": 109, "hamburg": 248,
    "hanover": 196, "jena": 119, "krefeld": 99, "monchengladbach": 94, "strasbourg": 365, "stuttgart": 196, "tubingen": 144,
    "ulm": 95, "weimar": 142, "zurich": 122,
}
# fmt: on
VALIDATION = {"frankfurt": 267, "lindau": 59, "munster": 174}
SIZES = {city: {"all": count} for city, count in {**TRAINING, **VALIDATION}.items()}
FOLDER = "folder with leftImg8bit/{train,val}/<city>/*_leftImg8bit.png and gtFine/{train,val}/<city>/*_gtFine_labelIds.png"
ARCHIVES = "archives leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip, as they were downloaded"
ARCHIVE_NAMES = ("leftImg8bit_trainvaltest.zip", "gtFine_trainvaltest.zip")
PLACES = ("cityscapes", "Cityscapes", ".")
ASPECT = 2
TEST_SHARE = 0.1
_NAME = re.compile(
    r"(?:^|/)(leftImg8bit|gtFine)/(train|val)/([^/]+)/([^/]+)_(?:leftImg8bit\.(?:png|jpe?g)|gtFine_label(?:Train)?Ids\.png)$"
)


def find(root: Path, height: int = 256) -> Sequence[DomainFiles]:
    """Return the cities below a folder, with training cities first."""
    packed = [tree for tree in joined_archives(root, PLACES, ARCHIVE_NAMES) if len(tree.trees) == len(ARCHIVE_NAMES)]
    for layout, trees in ((FOLDER, existing_trees(root, PLACES)), (ARCHIVES, packed)):
        for tree in trees:
            pairs = sorted(pairs_by_domain(tree, _key).items(), key=lambda item: (_is_validation(item[1]), item[0]))
            if pairs:
                return [_city(tree, layout, city, found, height) for city, found in pairs]
    return ()


def _is_validation(pairs: Pairs) -> bool:
    """Return True if the city is in the authors' validation split."""
    found = _NAME.search(pairs[0][0])
    return found is not None and found[2] == "val"


def _city(tree: FileTree, layout: str, city: str, pairs: Pairs, height: int) -> DomainFiles:
    has_train_ids = pairs[0][1].endswith("labelTrainIds.png")
    meaning = {label: label for label in range(len(CLASSES))} if has_train_ids else CLASS_OF_ID
    return mask_files(city, layout, tree, pairs, (height, ASPECT * height), meaning, _split)


def _key(file: str) -> tuple[bool, str, str] | None:
    found = _NAME.search(file)
    return None if found is None else (found[1] == "gtFine", found[3], found[4])


def _split(pairs: Pairs) -> Splits:
    """Use the last tenth of a training city for testing, and all of a validation city."""
    count = len(pairs)
    boundary = 0 if _is_validation(pairs) else count - max(1, round(TEST_SHARE * count))
    return {"train": np.arange(boundary), "test": np.arange(boundary, count)}


CITYSCAPES = Declaration(
    name="cityscapes",
    about="""Cityscapes: segmented street scenes, with one domain per city.

    The last tenth of each training city is used to test its client. The three cities of the authors' validation split have no
    training images. Hold them out with ``--unseen frankfurt --unseen lindau --unseen munster`` to score the newcomer model on them, as
    FixBN's Table 3 does on all 500 images. Images are decoded once, one city at a time, into memory-mapped arrays.
    """,
    title="Cityscapes",
    domains=(*TRAINING, *VALIDATION),
    classes=CLASSES,
    splits="the last tenth of each training city for testing; the authors' validation cities for testing only",
    terms="non-commercial use, after registration at cityscapes-dataset.com; redistribution is not allowed",
    citation="Cordts et al. 2016",
    layouts=(FOLDER, ARCHIVES),
    expected={FOLDER: SIZES, ARCHIVES: SIZES},
    default_model="deeplabv3plus",
    trains_with=TrainsWith(lr=0.001, optimizer="adam", batch_size=8),
    options=(
        height_option(256, "Height of the images, half of their width. Published images have 1024, which FixBN uses for testing."),
        *crop_options(192),
        normalise_option("imagenet"),
    ),
    page="https://www.cityscapes-dataset.com/downloads/: register, then leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip (packed or unpacked)",
    find=find,
    side=256,
    task=SEGMENTATION,
)

cityscapes = registered(CITYSCAPES)
