"""Tiny-ImageNet: 200 of ImageNet's classes at 64 pixels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from polyfed.data.declaration import Declaration, augment_option, normalise_option, registered, size_option, validation_option
from polyfed.data.formats.wordnet_folders import table, wordnet_files, wordnet_ids, wordnet_tree
from polyfed.data.store.archives import FileTree
from polyfed.data.store.download import RemoteFile
from polyfed.data.store.pixel_store import StreamedFiles

NUMBER = 200
CLASSES = tuple(f"class {number:03d}" for number in range(NUMBER))
DOMAIN = "Tiny-ImageNet"
LAYOUT = "folder tiny-imagenet-200/ or its zip (train/<id>/images/*, val/images/* with val_annotations.txt, or val/<id>/*)"
PLACES = ("tiny-imagenet-200", "", "tiny-imagenet-200.zip")


def find(root: Path, size: int, validation: float) -> list[StreamedFiles]:
    tree = wordnet_tree(root, PLACES)
    if tree is None:
        return []
    files = wordnet_files(
        tree, LAYOUT, data_set="tiny_imagenet", title=DOMAIN, classes=NUMBER, size=size, validation=validation, flat=_annotations
    )
    return [files]


def _annotations(tree: FileTree) -> Mapping[str, str]:
    return {line[0]: line[1] for line in table(tree, "val_annotations.txt", "\t")}


TINY_IMAGENET = Declaration(
    name="tiny_imagenet",
    about="""Tiny-ImageNet: 100,000 training images of 200 classes and 10,000 test images (its public validation split), 64x64.

    Classes are named by their WordNet ids. Images are decoded on first use.
    """,
    title="Tiny-ImageNet",
    domains=(DOMAIN,),
    classes=CLASSES,
    splits="the published training split; the public validation split for testing",
    terms="those of ImageNet: non-commercial research and education",
    citation="Le and Yang 2015",
    layouts=(LAYOUT,),
    expected={LAYOUT: {DOMAIN: {"train": (500,) * NUMBER, "test": (50,) * NUMBER}}},
    default_model="resnet18",
    options=(
        size_option(64, "Side of the images; the files have 64."),
        validation_option("Fraction of the training images used for validation, balanced across classes."),
        augment_option("imagenet", "Augmentation of training batches; by default PyTorch's recipe, as in FixBN."),
        normalise_option("imagenet"),
    ),
    page="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    files=(
        RemoteFile(
            "tiny-imagenet-200.zip",
            ("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
            "md5:90528d7ca1a48142e341f4ef8d21d0de",
            260 * 10**6,
        ),
    ),
    find=find,
    class_names=partial(wordnet_ids, places=PLACES, default=CLASSES),
)

tiny_imagenet = registered(TINY_IMAGENET)
