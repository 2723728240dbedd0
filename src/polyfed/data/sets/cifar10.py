"""CIFAR-10: a single domain of ten classes, to be split across clients by a partition."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.data.declaration import Declaration, augment_option, normalise_option, registered, validation_option
from polyfed.data.formats.unpickle import unpickled
from polyfed.data.store.archives import FileTree, existing_trees
from polyfed.data.store.cache import Arrays
from polyfed.data.store.domain_files import DomainFiles
from polyfed.data.store.download import RemoteFile
from polyfed.data.store.images import tiles
from polyfed.data.store.splits import split_at_test
from polyfed.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DOMAIN = "CIFAR-10"
SIDE = 32
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
TRAINING_BATCHES = 5

PICKLES = "cifar-10-batches-py/ or cifar-10-python.tar.gz (the published batches, as torchvision keeps them)"
PACKED = "packed cifar10_jpeg90.tar (JPEG quality 90, lossy)"
PICKLE_PLACES = ("cifar-10-batches-py", "", "cifar-10-python.tar.gz")
PACKED_FILE = "cifar10_jpeg90.tar"
PACKED_PLACES = (PACKED_FILE, "cifar10")


def find(root: Path, validation: float) -> list[DomainFiles]:
    for tree in existing_trees(root, PICKLE_PLACES):
        if tree.path.is_dir() and not any((tree.path / batch).is_file() for batch in BATCHES):
            continue
        return [_domain_files(PICKLES, tree, BATCHES, _read_pickles, validation)]
    for tree in existing_trees(root, PACKED_PLACES):
        names = (*(f"{batch}.jpg" for batch in BATCHES), "train_labels.txt", "test_labels.txt")
        return [_domain_files(PACKED, tree, names, _read_mosaics, validation)]
    return []


def _domain_files(layout: str, tree: FileTree, files: tuple[str, ...], read: Any, validation: float) -> DomainFiles:
    by_file = {name.split("/")[-1]: name for name in tree.names}
    missing = [name for name in files if name not in by_file]
    names = [by_file[name] for name in files if name in by_file]
    return DomainFiles(
        domain=DOMAIN,
        layout=layout,
        recipe={"set": "cifar10", "layout": layout},
        files=tree.identity(names),
        read=partial(read, tree, by_file),
        split=partial(split_at_test, validation),
        problems=tuple(f"{tree.path} does not contain {name}." for name in missing),
    )


def _read_pickles(tree: FileTree, by_file: dict[str, str], unreadable: list[str]) -> Arrays:
    batches = [_batch(tree, by_file.get(batch, batch)) for batch in BATCHES]
    sizes = [len(y) for _, y in batches]
    return {
        "x": np.concatenate([x for x, _ in batches]),
        "y": np.concatenate([y for _, y in batches]),
        "testing_from": np.array(sum(sizes[:TRAINING_BATCHES])),
    }


def _batch(tree: FileTree, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = unpickled(tree.read(name), f"{tree.path}/{name}")
    if not isinstance(content, dict) or not {"data", "labels"} <= content.keys():
        raise DataError(f"{name} in {tree.path} is not a CIFAR-10 batch: it has no data and labels.")
    data, labels = content["data"], _in_range(content["labels"], f"{tree.path}/{name}")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(labels), 3 * SIDE * SIDE):
        raise DataError(
            f"{name} in {tree.path} has data of shape {np.shape(data)} for {len(labels)} labels; expected bytes (n, 3072)."
        )
    return data.reshape(-1, 3, SIDE, SIDE), labels


def _read_mosaics(tree: FileTree, by_file: dict[str, str], unreadable: list[str]) -> Arrays:
    train, test = (
        _in_range(tree.read(by_file.get(name, name)).split(), f"{tree.path}/{name}")
        for name in ("train_labels.txt", "test_labels.txt")
    )
    per_batch = len(train) // TRAINING_BATCHES
    if per_batch * TRAINING_BATCHES != len(train):
        raise DataError(f"{tree.path} has {len(train)} training labels, which cannot be divided into five equal batches.")
    mosaics = [by_file.get(f"{batch}.jpg", f"{batch}.jpg") for batch in BATCHES]
    counts = [per_batch] * TRAINING_BATCHES + [len(test)]
    images = [tiles(tree.read(name), name, SIDE, count) for name, count in zip(mosaics, counts, strict=True)]
    return {"x": np.concatenate(images), "y": np.concatenate([train, test]), "testing_from": np.array(len(train))}


def _in_range(values: Iterable[Any], name: str) -> NDArray[np.int64]:
    try:
        labels = np.array([int(value) for value in values], np.int64)
    except (ValueError, TypeError) as error:
        raise DataError(f"{name} contains labels that are not integers: {error}.") from error
    if not len(labels) or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise DataError(f"{name} contains no labels, or labels outside 0 to {len(CLASSES) - 1}.")
    return labels


_EXPECTED = {DOMAIN: {"train": (5_000,) * 10, "test": (1_000,) * 10}}

CIFAR10 = Declaration(
    name="cifar10",
    about="CIFAR-10: 50,000 training and 10,000 test images of ten classes, 32x32, in the original order.",
    title="CIFAR-10",
    domains=(DOMAIN,),
    classes=CLASSES,
    splits="the published batches: five for training, one for test",
    terms="none stated for the data",
    citation="Krizhevsky 2009",
    layouts=(PICKLES, PACKED),
    packed_sha256={PACKED_FILE: "9003ac3573ef0dcd714d1b7fd8a291a7ea28de67a9e6ba956ba036bd46b702ba"},
    expected={PICKLES: _EXPECTED, PACKED: _EXPECTED},
    default_model="resnet20",
    side=SIDE,
    options=(
        validation_option("Fraction from the end of the training images used for validation."),
        augment_option(
            "crop_flip", 'Augmentation of training batches: "crop_flip" (FixBN) or "crop4_flip_cutout" (EasyFL, FedWon).'
        ),
        normalise_option("cifar10", 'Normalisation; FedTAN uses "imagenet".'),
    ),
    page="https://www.cs.toronto.edu/~kriz/cifar.html: cifar-10-python.tar.gz",
    files=(
        RemoteFile(
            "cifar-10-python.tar.gz",
            ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
            "md5:c58f30108f718f92721af3b95e74349a",
            200 * 10**6,
        ),
    ),
    find=find,
)

cifar10 = registered(CIFAR10)
