"""Fed-ISIC2019: eight kinds of skin lesions from six centres."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from polyfed.core.data_types import TrainsWith
from polyfed.data.declaration import (
    DataOption,
    Declaration,
    SplitCounts,
    augment_option,
    normalise_option,
    registered,
    size_option,
    validation_option,
)
from polyfed.data.store.archives import FileTree, FolderTree, existing_trees
from polyfed.data.store.cache import Arrays
from polyfed.data.store.domain_files import DomainFiles
from polyfed.data.store.images import Resizer, decode_all, resized, tiles
from polyfed.data.store.splits import Splits, grouped, with_validation
from polyfed.errors import DataError, OptionError

CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES = ("BCN", "Vidir-molemax", "Vidir-modern", "Rosendahl", "MSK", "Vienna-dias")
MOSAICS = {1: "vidir_molemax", 2: "vidir_modern", 3: "rosendahl", 5: "vienna_dias"}
TILE = 64
TEST_SHARE = 0.2

FLAMBY = "FLamby's ISIC_2019_Training_Input_preprocessed/ with its train_test_split, all six centres, FLamby's split"
PACKED = "packed ham10000_64.tar (four of six centres, middle square at 64 pixels), FLamby's split"
FLAMBY_IMAGES = "ISIC_2019_Training_Input_preprocessed"
FLAMBY_LISTS = ("train_test_split", "train_test_split.csv", "train_test_folds.csv", "dataset_creation_scripts/train_test_split")
PACKED_FILE = "ham10000_64.tar"
PACKED_PLACES = (PACKED_FILE, "ham10000")

PACKED_SIZES: Mapping[str, SplitCounts] = {
    "Vidir-molemax": {"train": (20, 2977, 2, 0, 96, 23, 45, 0), "test": (4, 743, 0, 0, 28, 7, 9, 0)},
    "Vidir-modern": {"train": (533, 1470, 174, 20, 379, 40, 64, 11), "test": (147, 362, 37, 1, 96, 11, 18, 0)},
    "Rosendahl": {"train": (276, 649, 223, 86, 406, 20, 3, 144), "test": (66, 154, 73, 23, 84, 10, 0, 42)},
    "Vienna-dias": {"train": (58, 276, 5, 0, 6, 4, 2, 0), "test": (9, 74, 0, 0, 4, 0, 1, 0)},
}
FLAMBY_SIZES: Mapping[str, SplitCounts] = {
    **PACKED_SIZES,
    "BCN": {"train": 9_930, "test": 2_483},
    "MSK": {"train": 655, "test": 164},
}

IndexRow: TypeAlias = dict[str, str]
"""Values of one image by column: centre, label and fold."""

SplitRule: TypeAlias = Callable[[Arrays], Splits]


def find(root: Path, size: int, split: str, validation: float) -> list[DomainFiles]:
    rule = partial(_split, validation) if split == "flamby" else partial(_split_by_lesion, validation)
    if split == "lesions" and (root / FLAMBY_IMAGES).is_dir():
        raise OptionError(
            "fed_isic2019: split='lesions' requires lesion ids, which FLamby's split does not have. "
            "Use split='flamby', or the packed HAM10000."
        )
    if (root / FLAMBY_IMAGES).is_dir():
        lists = [root / place for place in FLAMBY_LISTS if (root / place).is_file()]
        if not lists:
            raise FED_ISIC2019.not_found(root, f"The split of Fed-ISIC2019 ({' or '.join(FLAMBY_LISTS)})")
        return _flamby_domains(FolderTree(root / FLAMBY_IMAGES), lists[0], size, rule)
    for tree in existing_trees(root, PACKED_PLACES):
        return _packed_domains(tree, size, rule)
    return []


def _flamby_domains(images: FolderTree, split_file: Path, size: int, rule: SplitRule) -> list[DomainFiles]:
    rows = _rows(split_file.read_bytes(), str(split_file), ("image", "target", "center", "fold"))
    file_of = {name.rsplit(".", 1)[0]: name for name in images.names}
    found = []
    for centre, domain in enumerate(CENTRES):
        listed = [row for row in rows if row["center"] == str(centre)]
        present = [row for row in listed if row["image"] in file_of]
        missing = [
            f"The image {row['image']} of {domain} is listed in {split_file.name} but missing."
            for row in listed
            if row["image"] not in file_of
        ]
        names = [file_of[row["image"]] for row in present]
        found.append(
            DomainFiles(
                domain=domain,
                layout=FLAMBY,
                recipe={"set": "fed_isic2019", "layout": FLAMBY, "size": size, "split": split_file.name},
                files=[*images.identity(names), *FolderTree(split_file.parent).identity([split_file.name])],
                read=partial(_read_files, images, names, present, size),
                split=rule,
                middle_square=True,
                problems=tuple(missing) if listed else (f"{split_file} lists no image of the centre {centre} ({domain}).",),
            )
        )
    return found


def _packed_domains(tree: FileTree, size: int, rule: SplitRule) -> list[DomainFiles]:
    by_file = {name.split("/")[-1]: name for name in tree.names}
    if "index.csv" not in by_file:
        raise DataError(f"{tree.path} does not contain index.csv, which describes its mosaics. Download the file again.")
    index = by_file["index.csv"]
    columns = ("domain", "tile", "lesion_id", "flamby_target", "flamby_fold")
    rows = _rows(tree.read(index), f"{tree.path}/{index}", columns)
    found = []
    for centre, mosaic in MOSAICS.items():
        listed = [
            {**row, "target": row["flamby_target"], "fold": row["flamby_fold"]}
            for row in sorted((row for row in rows if row["domain"] == mosaic), key=lambda row: int(row["tile"]))
        ]
        file = by_file.get(f"{mosaic}.jpg")
        found.append(
            DomainFiles(
                domain=CENTRES[centre],
                layout=PACKED,
                recipe={"set": "fed_isic2019", "layout": PACKED, "size": size},
                files=tree.identity([index, *([file] if file else [])]),
                read=partial(_read_mosaic, tree, str(file), listed, size),
                split=rule,
                middle_square=True,
                problems=() if file and listed else (f"{tree.path} does not contain {mosaic}.jpg, or index.csv does not list it.",),
            )
        )
    return found


def _rows(content: bytes, name: str, columns: Sequence[str]) -> list[IndexRow]:
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Cannot read {name} as a table: {error}.") from error
    lacking = [column for column in columns if not rows or not isinstance(rows[0].get(column), str)]
    if lacking:
        raise DataError(f"{name} lacks the columns {', '.join(lacking)}.")
    return rows


def _read_files(images: FolderTree, names: list[str], rows: list[IndexRow], size: int, unreadable: list[str]) -> Arrays:
    x, readable = decode_all(images, names, Resizer((size, size), middle_square=True), unreadable)
    return {"x": x, **_labels([rows[position] for position in readable])}


def _read_mosaic(tree: FileTree, file: str, rows: list[IndexRow], size: int, unreadable: list[str]) -> Arrays:
    if not rows:
        raise DataError(f"The index.csv of {tree.path} lists no tile of {file}.")
    x = tiles(tree.read(file), file, TILE, int(rows[-1]["tile"]) + 1)[[int(row["tile"]) for row in rows]]
    lesions = {lesion: number for number, lesion in enumerate(sorted({row["lesion_id"] for row in rows}))}
    return {"x": resized(x, size), **_labels(rows), "group": np.array([lesions[row["lesion_id"]] for row in rows], np.int64)}


def _labels(rows: Sequence[IndexRow]) -> Arrays:
    targets = [int(row["target"]) for row in rows]
    wrong = [target for target in targets if not 0 <= target < len(CLASSES)]
    if wrong:
        raise DataError(f"Fed-ISIC2019 has targets 0 to {len(CLASSES) - 1}, got {wrong[0]}.")
    return {"y": np.array(targets, np.int64), "testing": np.array([row["fold"] == "test" for row in rows], np.bool_)}


def _split(validation: float, arrays: Arrays) -> Splits:
    return with_validation(np.flatnonzero(~arrays["testing"]), np.flatnonzero(arrays["testing"]), validation)


def _split_by_lesion(validation: float, arrays: Arrays) -> Splits:
    """Split 80/20 without splitting lesions, and take validation images in the same way."""
    y, lesions = arrays["y"], arrays["group"]
    rest, test = grouped(y, lesions, TEST_SHARE, seed=0)
    rest = np.sort(rest)
    train, taken = grouped(y[rest], lesions[rest], validation, seed=0)
    return {"train": np.sort(rest[train]), "validation": rest[taken], "test": test}


FED_ISIC2019 = Declaration(
    name="fed_isic2019",
    about="""Fed-ISIC2019: eight kinds of skin lesions from six centres, with FLamby's split.

    The packed files contain HAM10000, which covers four of the six centres. The shorter side of FLamby's images has 224 pixels, and
    the other side varies. polyfed crops and resizes the middle square, whereas FLamby crops 200x200 at random (training) or from the
    centre (test). The natural ids of the packed images are their lesions. In FLamby's split, train and test share lesions; with
    ``split="lesions"`` they do not.
    """,
    title="Fed-ISIC2019",
    domains=CENTRES,
    classes=CLASSES,
    splits="FLamby's fixed split",
    terms="CC BY-NC 4.0 (ISIC 2019, as FLamby states); HAM10000 has its own terms at the Harvard Dataverse",
    citation="Tschandl et al. 2018",
    layouts=(FLAMBY, PACKED),
    packed_sha256={PACKED_FILE: "a8782da4cf60ce2ba8b5b28e639f7ddd6efb1f0117922e96fc2a39a3272ddc42"},
    expected={FLAMBY: FLAMBY_SIZES, PACKED: PACKED_SIZES},
    default_model="resnet18",
    trains_with=TrainsWith(lr=0.005, batch_size=64),
    options=(
        size_option(TILE, "Side of the images; packed images have 64."),
        DataOption(
            "split",
            "flamby",
            '"flamby" (FLamby\'s split by image), or "lesions" (80/20 by class without splitting lesions; packed files only).',
            choices=("flamby", "lesions"),
            note=lambda split: "lesions kept together" if split == "lesions" else "",
        ),
        validation_option("Fraction of the training images used for validation: the end of each centre's order, or whole lesions."),
        augment_option("skin"),
        normalise_option("imagenet"),
    ),
    page="https://github.com/owkin/FLamby: its download and preprocessing scripts for Fed-ISIC2019, after agreeing to the terms of ISIC 2019",
    find=find,
)

fed_isic2019 = registered(FED_ISIC2019)
