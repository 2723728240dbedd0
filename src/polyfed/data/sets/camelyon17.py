"""Camelyon17 in the form of WILDS: patches of lymph nodes with and without tumour from five hospitals."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from polyfed.data.declaration import DataOption, Declaration, augment_option, normalise_option, registered, size_option
from polyfed.data.store.archives import FileTree, existing_trees
from polyfed.data.store.domain_files import first_of
from polyfed.data.store.pixel_store import StreamedFiles
from polyfed.data.store.splits import Splits, grouped, in_turn, stratified
from polyfed.errors import DataError

CLASSES = ("normal", "tumor")
DOMAINS = tuple(f"hospital {number}" for number in range(1, 6))
SIZES = (59_436, 34_904, 85_054, 129_838, 146_722)
FOLDER = "WILDS' folder camelyon17_v1.0/ with metadata.csv and patches/"
PLACES = ("camelyon17_v1.0", "wilds/camelyon17_v1.0", "data/camelyon17_v1.0", "")
TABLE = "metadata.csv"
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
HELD_OUT = 0.2


def find(root: Path, size: int, split: str) -> list[StreamedFiles]:
    for tree in existing_trees(root, PLACES):
        if (tree.path / TABLE).is_file():
            return _hospitals(tree, size, split)
    return []


def _hospitals(tree: FileTree, size: int, split: str) -> list[StreamedFiles]:
    rows = _rows(tree)
    existing = set(tree.names)
    found = []
    for centre, domain in enumerate(DOMAINS):
        listed = [row for row in rows if row["center"] == str(centre)]
        present = [row for row in listed if _file(row) in existing]
        missing = [_file(row) for row in listed if _file(row) not in existing]
        problems = [f"{TABLE} lists no patch of {domain} (center {centre})."] if not listed else []
        if missing:
            problems.append(f"{len(missing)} patches of {domain} are listed in {TABLE} but missing: {first_of(missing)}.")
        labels = np.array([int(row["tumor"]) for row in present], np.int64)
        patients = np.array([int(row["patient"]) for row in present], np.int64)
        found.append(
            StreamedFiles(
                domain=domain,
                layout=FOLDER,
                data_set="camelyon17",
                tree=tree,
                names=[_file(row) for row in present],
                labels=labels,
                splits=_split(split, labels, patients),
                size=size,
                problems=tuple(problems),
                groups=patients,
            )
        )
    return found


def _rows(tree: FileTree) -> list[dict[str, str]]:
    try:
        rows = list(csv.DictReader(io.StringIO(tree.read(TABLE).decode("utf-8"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Cannot read {tree.path / TABLE} as a table: {error}.") from error
    lacking = [column for column in COLUMNS if not rows or column not in rows[0]]
    if lacking:
        raise DataError(f"{tree.path / TABLE} lacks the columns {', '.join(lacking)}.")
    wrong = [number for number, row in enumerate(rows, 2) if not all((row[column] or "").isdecimal() for column in COLUMNS)]
    if wrong:
        raise DataError(f"{tree.path / TABLE}, line {wrong[0]}: a value of {', '.join(COLUMNS)} is not a number.")
    return rows


def _file(row: dict[str, str]) -> str:
    slide = f"patient_{row['patient'].zfill(3)}_node_{row['node']}"
    return f"patches/{slide}/patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"


def _split(split: str, labels: np.ndarray, patients: np.ndarray) -> Splits:
    """Use four fifths for training, and split the rest between validation and test, alternately or by patient."""
    if split == "images":
        return in_turn(labels, stratified(labels, HELD_OUT, seed=0)[0])
    rest, held_out = grouped(labels, patients, HELD_OUT, seed=0)
    other, test = grouped(labels[held_out], patients[held_out], 0.5, seed=0)
    return {"train": np.sort(rest), "validation": held_out[np.sort(other)], "test": held_out[test]}


CAMELYON17 = Declaration(
    name="camelyon17",
    about="""Camelyon17: 96x96 patches of lymph nodes from five hospitals, with or without tumour in the centre.

    Hospital 1 is center 0 of WILDS. A split with seed 0 uses four fifths of each hospital for training, as in gPerXAN, and the rest
    for validation and test. With ``split="images"``, as in the paper, the splits share patients; with ``"patients"`` they do not.
    Patches are decoded on first use. WILDS has 455,954 patches; gPerXAN reports 455,964.
    """,
    title="Camelyon17",
    domains=DOMAINS,
    classes=CLASSES,
    splits="stratified 80/20 with seed 0, by image or by patient",
    terms="CC0 1.0 (WILDS)",
    citation="Bandi et al. 2018; Koh et al. 2021 (WILDS)",
    layouts=(FOLDER,),
    expected={FOLDER: {domain: {"all": count} for domain, count in zip(DOMAINS, SIZES, strict=True)}},
    default_model="resnet18",
    options=(
        size_option(96, "Side of the images; the patches have 96."),
        DataOption("split", "images", '"images" (as in gPerXAN) or "patients" (patients are never split).', ("images", "patients")),
        augment_option("flip_jitter", "Augmentation of training batches; by default that of gPerXAN."),
        normalise_option("imagenet"),
    ),
    page="https://wilds.stanford.edu/datasets/: camelyon17_v1.0, unpacked (10 GB)",
    find=find,
)

camelyon17 = registered(CAMELYON17)
