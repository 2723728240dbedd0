"""Read ImageNet and Tiny-ImageNet: one training folder per WordNet id, and validation images in folders or in a flat list."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from polyfed.data.store.archives import FileTree, FolderTree, existing_trees
from polyfed.data.store.domain_files import first_of
from polyfed.data.store.images import is_image
from polyfed.data.store.pixel_store import StreamedFiles
from polyfed.data.store.splits import with_validation
from polyfed.errors import DataError

WORDNET_ID = re.compile(r"n\d{8}")
FlatLabels: TypeAlias = Callable[[FileTree], Mapping[str, str]]
"""Returns the WordNet id of each validation file that is not in a class folder."""


def wordnet_files(
    tree: FileTree,
    layout: str,
    *,
    data_set: str,
    title: str,
    classes: int,
    size: int,
    validation: float,
    flat: FlatLabels = lambda tree: {},
) -> StreamedFiles:
    """Return the only domain of a tree with ``train`` and ``val``, using the public validation images for testing.

    ``validation`` is the fraction of the training images for validation, balanced across classes.
    """
    trained, tested, unknown = _files(tree, flat)
    ids = sorted({wordnet for wordnet, _ in trained})
    place = {wordnet: number for number, wordnet in enumerate(ids)}
    problems = []
    if len(ids) != classes:
        problems.append(f"{tree.path}: {len(ids)} class folders in train, expected {classes}.")
    if unknown:
        problems.append(
            f"{tree.path}: the class of {len(unknown)} validation images is unknown: {first_of(unknown)}. Move them to val/<id>/."
        )
    if not tested:
        problems.append(f"{tree.path} has no validation images, which are used for testing.")
    files = [(place[wordnet], name) for wordnet, name in (*trained, *tested) if wordnet in place]
    labels = np.array([label for label, _ in files], np.int64)
    # This order alternates between all classes, so that its end, which is used for validation, contains all of them.
    by_turn = np.argsort(_rank_in_class(labels[: len(trained)]), kind="stable")
    splits = with_validation(by_turn, np.arange(len(trained), len(files)), validation)
    splits = {**splits, "train": np.sort(splits["train"]), "validation": np.sort(splits["validation"])}
    names = [name for _, name in files]
    return StreamedFiles(title, layout, data_set, tree, names, labels, splits, size, tuple(problems))


def wordnet_ids(root: Path, places: Sequence[str], default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the WordNet ids of the training folders in the first existing place, or the default if their number is wrong."""
    tree = wordnet_tree(root, places)
    if tree is None:
        return default
    if isinstance(tree, FolderTree):  # Listing all files of ImageNet takes long; the folders are enough.
        found = os.listdir(tree.path / "train")
    else:
        found = [wordnet for wordnet, _ in _files(tree, lambda tree: {})[0]]
    ids = tuple(sorted({name for name in found if WORDNET_ID.fullmatch(name)}))
    return ids if len(ids) == len(default) else default


def wordnet_tree(root: Path, places: Sequence[str]) -> FileTree | None:
    """Return the first folder that contains ``train`` and ``val``, or the first archive."""
    for tree in existing_trees(root, places):
        if tree.path.is_file() or ((tree.path / "train").is_dir() and (tree.path / "val").is_dir()):
            return tree
    return None


def _files(tree: FileTree, flat: FlatLabels) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Return training files and test files with their WordNet ids, and test files without an id."""
    listed: Mapping[str, str] | None = None
    trained, tested, unknown = [], [], []
    for name in filter(is_image, tree.names):
        parts = name.split("/")
        wordnet = next((part for part in parts[:-1] if WORDNET_ID.fullmatch(part)), "")
        if "train" in parts[:-1] and wordnet:
            trained.append((wordnet, name))
        elif "val" in parts[:-1]:
            if not wordnet:
                listed = flat(tree) if listed is None else listed
                wordnet = listed.get(parts[-1], "")
            tested.append((wordnet, name)) if wordnet else unknown.append(name)
    return trained, tested, unknown


def _rank_in_class(labels: np.ndarray) -> np.ndarray:
    """Return for each example the number of preceding examples of the same class."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels[order]) if len(labels) else np.empty(0, np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    found = np.empty(len(labels), np.int64)
    found[order] = np.arange(len(labels)) - starts
    return found


def table(tree: FileTree, file: str, separator: str) -> list[list[str]]:
    """Return the lines of a table in the tree, or nothing if it does not exist."""
    names = [name for name in tree.names if name.split("/")[-1] == file]
    if not names:
        return []
    try:
        return [line for line in csv.reader(io.StringIO(tree.read(names[0]).decode("utf-8")), delimiter=separator) if len(line) > 1]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"Cannot read {tree.path}/{names[0]} as a table: {error}.") from error
