"""ImageNet: the 1,000 classes of ILSVRC 2012."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polyfed.data.archives import FileTree, JoinedTree
from polyfed.data.declaration import (
    Declaration,
    SplitCounts,
    augment_option,
    normalise_option,
    registered,
    size_option,
    validation_option,
)
from polyfed.data.imagenet_labels import LISTS, validation_ids
from polyfed.data.streamed_files import StreamedFiles
from polyfed.data.tar_of_tars import TarOfTars
from polyfed.data.wordnet_folders import holding, wordnet_files, wordnet_ids

NUMBER = 1000
CLASSES = tuple(f"class {number:03d}" for number in range(NUMBER))
DOMAIN = "ImageNet"
FOLDERS = f"folders train/<id>/* and val/<id>/* (torchvision's), or Kaggle's ILSVRC/Data/CLS-LOC/, or val/* with {LISTS}"
ARCHIVES = f"archives ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, as they were downloaded, with {LISTS}"
SIZES: Mapping[str, SplitCounts] = {DOMAIN: {"train": 1_281_167, "test": (50,) * NUMBER}}
PLACES = ("imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "")
TRAINING_ARCHIVE, VALIDATION_ARCHIVE = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"


def find(root: Path, size: int, validation: float) -> list[StreamedFiles]:
    """The one domain under a folder."""
    layout, tree = _tree(root)
    if tree is None:
        return []
    found = wordnet_files(
        tree, layout, data_set="imagenet", title=DOMAIN, classes=NUMBER, size=size, validation=validation, flat=validation_ids
    )
    return [found]


def class_names(root: Path, usual: tuple[str, ...] = CLASSES) -> tuple[str, ...]:
    """The WordNet ids of the classes under a folder."""
    return wordnet_ids(_tree(root)[1], usual)


def _tree(root: Path) -> tuple[str, FileTree | None]:
    """The files, and the layout they are in."""
    unpacked = holding(root, PLACES)
    if unpacked is not None:
        return FOLDERS, unpacked
    for folder in (root / place for place in PLACES):
        parts = {"train": folder / TRAINING_ARCHIVE, "val": folder / VALIDATION_ARCHIVE}
        if parts["train"].is_file():
            return ARCHIVES, JoinedTree(folder, [TarOfTars(path, part) for part, path in parts.items() if path.is_file()])
    return "", None


IMAGENET = Declaration(
    name="imagenet",
    about="""ImageNet: 1,281,167 training images of 1,000 classes and 50,000 test images (its public validation part).

    Classes are called by their WordNet ids. The middle square of an image is resized to ``size`` and kept on disk when it is first
    needed, as long as POLYFED_CACHE_GB allows (at 224 pixels all training images take 193 GB); others are decoded again.
    """,
    title="ImageNet",
    domains=(DOMAIN,),
    classes=CLASSES,
    splits="the published training part; the public validation part for testing",
    terms="non-commercial research and education; the files come from image-net.org after a registration",
    citation="Russakovsky et al. 2015",
    layouts=(FOLDERS, ARCHIVES),
    expected={FOLDERS: SIZES, ARCHIVES: SIZES},
    default_model="resnet18",
    options=(
        size_option(224, "Side of the images."),
        validation_option("Share of the training images for validation, evenly over the classes."),
        augment_option("imagenet", "Augmentation of training batches; PyTorch's recipe by default."),
        normalise_option("imagenet"),
    ),
    page="https://image-net.org/download.php: register and agree to the terms, get the ILSVRC 2012 training and validation images and the development kit (task 1 & 2), as they are or unpacked to train/<id>/ and val/<id>/; or Kaggle's imagenet-object-localization-challenge",
    find=find,
    class_names=class_names,
)

imagenet = registered(IMAGENET)
