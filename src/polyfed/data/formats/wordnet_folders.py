"""ImageNet and Tiny-ImageNet: training images in a folder for each WordNet id, validation images in folders or in a flat list."""

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
"""The WordNet id of each validation file that lies in no folder of its own."""


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
    """The one domain in a tree, its public validation images as the test part.

    Args:
        tree: The files, under ``train`` and ``val``.
        layout: What to call what was found.
        data_set: The name of the data set.
        title: The name of its domain.
        classes: How many classes there are.
        size: Side of the images.
        validation: Share of the training images for validation, the same number of each class where classes are even.
        flat: Labels of validation files that lie in no folder of their own.
    """
    trained, tested, unknown = _files(tree, flat)
    ids = sorted({wordnet for wordnet, _ in trained})
    place = {wordnet: number for number, wordnet in enumerate(ids)}
    problems = []
    if len(ids) != classes:
        problems.append(f"{tree.path}: {len(ids)} folders of classes in train, expected {classes}.")
    if unknown:
        problems.append(
            f"{tree.path}: the class of {len(unknown)} validation images is not known: {first_of(unknown)}. Sort them into val/<id>/."
        )
    if not tested:
        problems.append(f"{tree.path} holds no validation images, which are the test part.")
    files = [(place[wordnet], name) for wordnet, name in (*trained, *tested) if wordnet in place]
    labels = np.array([label for label, _ in files], np.int64)
    # In an order that takes all classes in turn, so that the end, taken for validation, has all of them.
    by_turn = np.argsort(_number_within(labels[: len(trained)]), kind="stable")
    splits = with_validation(by_turn, np.arange(len(trained), len(files)), validation)
    splits = {**splits, "train": np.sort(splits["train"]), "validation": np.sort(splits["validation"])}
    names = [name for _, name in files]
    return StreamedFiles(title, layout, data_set, tree, names, labels, splits, size, tuple(problems))


def wordnet_ids(root: Path, places: Sequence[str], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the WordNet ids of the training folders in the first of these places, or the usual names if there are not as many."""
    tree = holding(root, places)
    if tree is None:
        return usual
    if isinstance(tree, FolderTree):  # Listing all files of ImageNet takes long; its folders are enough.
        found = os.listdir(tree.path / "train")
    else:
        found = [wordnet for wordnet, _ in _files(tree, lambda tree: {})[0]]
    ids = tuple(sorted({name for name in found if WORDNET_ID.fullmatch(name)}))
    return ids if len(ids) == len(usual) else usual


def holding(root: Path, places: Sequence[str]) -> FileTree | None:
    """The first of these folders and archives that holds ``train`` and ``val``."""
    for tree in existing_trees(root, places):
        if tree.path.is_file() or ((tree.path / "train").is_dir() and (tree.path / "val").is_dir()):
            return tree
    return None


def _files(tree: FileTree, flat: FlatLabels) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[str]]:
    """Training files and test files with their WordNet ids, and test files without one."""
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


def _number_within(labels: np.ndarray) -> np.ndarray:
    """For each example the number of examples of its class before it."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels[order]) if len(labels) else np.empty(0, np.int64)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    found = np.empty(len(labels), np.int64)
    found[order] = np.arange(len(labels)) - starts
    return found


def table(tree: FileTree, file: str, separator: str) -> list[list[str]]:
    """The lines of a table in the tree; none if it is not there."""
    names = [name for name in tree.names if name.split("/")[-1] == file]
    if not names:
        return []
    try:
        return [line for line in csv.reader(io.StringIO(tree.read(names[0]).decode("utf-8")), delimiter=separator) if len(line) > 1]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{tree.path}/{names[0]} cannot be read as a table: {error}.") from error
