"""The classes of ImageNet's validation images where these lie in one flat folder: each of the lists that people have next to them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polyfed.data.archives import FileTree, FolderTree, existing_trees
from polyfed.data.wordnet_folders import WORDNET_ID, table
from polyfed.errors import DataError

LISTS = "the development kit, torchvision's meta.bin, Kaggle's LOC_val_solution.csv or imagenet_2012_validation_synset_labels.txt"
KAGGLE_TABLE = "LOC_val_solution.csv"
TORCHVISION_LIST = "meta.bin"
ID_LIST = "imagenet_2012_validation_synset_labels.txt"
KIT = "ILSVRC2012_devkit_t12"
KIT_CLASSES, KIT_LABELS = "meta.mat", "ILSVRC2012_validation_ground_truth.txt"
ABOVE = 4
"""Kaggle's list lies next to the folder ILSVRC, the images in ILSVRC/Data/CLS-LOC/val."""


def validation_ids(tree: FileTree) -> Mapping[str, str]:
    """The WordNet id of each validation file, from the first list that lies in the tree's folder or above it; none without a list."""
    for folder in [tree.path, *tree.path.parents[:ABOVE]]:
        for read in READERS:
            if found := read(folder):
                return found
    return {}


def _kaggle(folder: Path) -> Mapping[str, str]:
    """Kaggle's table: an image's id, then its class and box, perhaps more of these."""
    rows = table(_Only(folder), KAGGLE_TABLE, ",") if (folder / KAGGLE_TABLE).is_file() else []
    return {f"{line[0]}.JPEG": line[1].split()[0] for line in rows[1:] if line[1].split()}


class _Only(FolderTree):
    """A folder of which only the list is read: what else lies there may be large."""

    names = (KAGGLE_TABLE,)


def _torchvision(folder: Path) -> Mapping[str, str]:
    """Torchvision's list: names of the classes by WordNet id, and the id of each validation image in order."""
    path = folder / TORCHVISION_LIST
    if not path.is_file():
        return {}
    import torch

    try:
        _, ids = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises whatever a file of another kind makes it trip over
        raise DataError(f"{path} cannot be read as the list that torchvision makes of the development kit: {error}.") from error
    return _in_order(path, ids)


def _kit(folder: Path) -> Mapping[str, str]:
    """The development kit, as it was downloaded or unpacked: a number for each image, and the WordNet id of each number."""
    for tree in existing_trees(folder, (KIT, f"{KIT}.tar.gz")):
        names = {name.split("/")[-1]: name for name in tree.names}
        if KIT_CLASSES in names and KIT_LABELS in names:
            id_of = _kit_classes(tree.read(names[KIT_CLASSES]), tree.path)
            numbers = tree.read(names[KIT_LABELS]).decode("ascii", "replace").split()
            return _in_order(tree.path, [id_of.get(number, f"number {number}") for number in numbers])
    return {}


def _kit_classes(content: bytes, path: Path) -> dict[str, str]:
    from scipy.io import loadmat

    try:
        classes = loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])["synsets"]
        return {str(number): str(wordnet) for number, wordnet in zip(classes["ILSVRC2012_ID"], classes["WNID"], strict=True)}
    except Exception as error:  # scipy's reader raises whatever a damaged file makes its parser trip over
        raise DataError(f"{path}: {KIT_CLASSES} cannot be read: {error}. Get the file again.") from error


def _id_list(folder: Path) -> Mapping[str, str]:
    """A WordNet id a line, in the order of the images."""
    path = folder / ID_LIST
    return _in_order(path, path.read_text("ascii", "replace").split()) if path.is_file() else {}


def _in_order(path: Path, ids: Sequence[str]) -> Mapping[str, str]:
    """The first image of the list has the number 1 in its name."""
    wrong = next((wordnet for wordnet in ids if not isinstance(wordnet, str) or not WORDNET_ID.fullmatch(wordnet)), None)
    if wrong is not None:
        raise DataError(f"{path} gives a validation image the class {wrong!r}, which is no WordNet id such as n01440764.")
    return {f"ILSVRC2012_val_{number:08d}.JPEG": wordnet for number, wordnet in enumerate(ids, 1)}


READERS: Sequence[Callable[[Path], Mapping[str, str]]] = (_kaggle, _kit, _torchvision, _id_list)
