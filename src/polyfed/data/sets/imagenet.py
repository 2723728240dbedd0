"""ImageNet: the 1,000 classes of ILSVRC 2012."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from polyfed.data.archives import FileTree, FolderTree
from polyfed.data.declaration import Declaration, augment_option, normalise_option, registered, size_option, validation_option
from polyfed.data.streamed_files import StreamedFiles
from polyfed.data.wordnet_folders import find_wordnet, table, wordnet_ids

NUMBER = 1000
CLASSES = tuple(f"class {number:03d}" for number in range(NUMBER))
DOMAIN = "ImageNet"
LAYOUT = "folders train/<id>/* and val/<id>/* (torchvision's), or Kaggle's ILSVRC/Data/CLS-LOC/ with LOC_val_solution.csv"
PLACES = ("imagenet", "ImageNet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "")
KAGGLE_TABLE = "LOC_val_solution.csv"
KAGGLE_ABOVE = 4


def find(root: Path, size: int, validation: float) -> list[StreamedFiles]:
    """The one domain under a folder."""
    return find_wordnet(
        root, PLACES, LAYOUT, data_set="imagenet", title=DOMAIN, classes=NUMBER, size=size, validation=validation, flat=_kaggle
    )


def _kaggle(tree: FileTree) -> Mapping[str, str]:
    """Kaggle's list lies next to the folder ILSVRC: an image's id, then its class and box, perhaps more of these."""
    for folder in [tree.path, *tree.path.parents[:KAGGLE_ABOVE]]:
        if (folder / KAGGLE_TABLE).is_file():
            rows = table(_Only(folder), KAGGLE_TABLE, ",")
            return {f"{line[0]}.JPEG": line[1].split()[0] for line in rows[1:] if line[1].split()}
    return {}


class _Only(FolderTree):
    """A folder of which only the list is read: what else lies there may be large."""

    names = (KAGGLE_TABLE,)


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
    layouts=(LAYOUT,),
    expected={LAYOUT: {DOMAIN: {"train": 1_281_167, "test": (50,) * NUMBER}}},
    default_model="resnet18",
    options=(
        size_option(224, "Side of the images."),
        validation_option("Share of the training images for validation, evenly over the classes."),
        augment_option("imagenet", "Augmentation of training batches; PyTorch's recipe by default."),
        normalise_option("imagenet"),
    ),
    page="https://image-net.org/download.php: register and agree to the terms, get the ILSVRC 2012 training and validation images, and unpack them to train/<id>/ and val/<id>/; or Kaggle's imagenet-object-localization-challenge",
    find=find,
    class_names=partial(wordnet_ids, places=PLACES, usual=CLASSES),
)

imagenet = registered(IMAGENET)
