"""ImageNet: the 1,000 classes of ILSVRC 2012."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from polyfed.data.declaration import (
    Declaration,
    SplitCounts,
    augment_option,
    normalise_option,
    registered,
    size_option,
    validation_option,
)
from polyfed.data.formats.wordnet_folders import wordnet_files, wordnet_ids, wordnet_tree
from polyfed.data.store.pixel_store import StreamedFiles
from polyfed.errors import DataError

NUMBER = 1000
CLASSES = tuple(f"class {number:03d}" for number in range(NUMBER))
DOMAIN = "ImageNet"
LAYOUT = "folders train/<id>/* and val/<id>/*, as torchvision unpacks them"
SIZES: Mapping[str, SplitCounts] = {DOMAIN: {"train": 1_281_167, "test": (50,) * NUMBER}}
PLACES = ("imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "")
TRAINING_ARCHIVE = "ILSVRC2012_img_train.tar"


def find(root: Path, size: int, validation: float) -> list[StreamedFiles]:
    tree = wordnet_tree(root, PLACES)
    if tree is None:
        for archive in (root / place / TRAINING_ARCHIVE for place in PLACES):
            if archive.is_file():
                raise DataError(
                    f"{archive} is not unpacked. Unpack it to train/<id>/ and val/<id>/ with torchvision.datasets.ImageNet or tar."
                )
        return []
    return [wordnet_files(tree, LAYOUT, data_set="imagenet", title=DOMAIN, classes=NUMBER, size=size, validation=validation)]


IMAGENET = Declaration(
    name="imagenet",
    about="""ImageNet: 1,281,167 training images of 1,000 classes and 50,000 test images (its public validation split).

    Classes are named by their WordNet ids. On first use, the middle square of an image is resized to ``size`` and cached on disk,
    within the limit of POLYFED_CACHE_GB (at 224 pixels, all training images take 193 GB). Other images are decoded every time.
    """,
    title="ImageNet",
    domains=(DOMAIN,),
    classes=CLASSES,
    splits="the published training split; the public validation split for testing",
    terms="non-commercial research and education; the files require registration at image-net.org",
    citation="Russakovsky et al. 2015",
    layouts=(LAYOUT,),
    expected={LAYOUT: SIZES},
    default_model="resnet18",
    options=(
        size_option(224, "Side of the images."),
        validation_option("Fraction of the training images used for validation, balanced across classes."),
        augment_option("imagenet", "Augmentation of training batches; by default PyTorch's recipe."),
        normalise_option("imagenet"),
    ),
    page="https://image-net.org/download.php: register and agree to the terms, download the ILSVRC 2012 training and validation images and the development kit (task 1 & 2), and unpack them with torchvision.datasets.ImageNet",
    find=find,
    class_names=partial(wordnet_ids, places=PLACES, default=CLASSES),
)

imagenet = registered(IMAGENET)
