"""digits-mini: five small domains of digits, generated from resources of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.data_types import ArrayExamples, DataSet, Domain, TrainsWith
from polyfed.data.registry import data_sets
from polyfed.data.sets import digit_recipes as recipes
from polyfed.data.sets.digit_recipes import Box, Material, Pixels
from polyfed.errors import OptionError

DOMAINS = ("pen", "photo", "print", "street", "post")
HANDWRITTEN = ("pen", "photo", "post")
SPLITS = ("train", "validation", "test")
CLASSES = tuple(str(digit) for digit in range(10))
SOURCE = "made on the fly from scikit-learn's digits and sample images and matplotlib's fonts (polyfed digits-mini, recipe 1)"

HANDWRITTEN_PER_CLASS = {"train": 30, "validation": 6, "test": 22}
PRINTED_PER_CLASS = {"train": 30, "validation": 6, "test": 40}
PHOTO_BLOCK_FRACTIONS = {"train": 0.7, "validation": 0.1, "test": 0.2}
MAX_TRAINING_EXAMPLES = HANDWRITTEN_PER_CLASS["train"] * len(CLASSES)

_RECIPE = 1
_ORDER, _HANDWRITING, _PHOTO_REGIONS, _PICTURES = range(4)

Indices: TypeAlias = NDArray[np.int64]


def digits_mini(per_domain: int = MAX_TRAINING_EXAMPLES) -> DataSet:
    """Five small domains of 28x28 colour digits, generated in seconds without a download.

    pen is white handwriting on black; photo is handwriting blended with photographs; print is coloured type, rotated and sheared;
    street is bold type between other digits in uneven light; post is thick handwriting at low resolution with noise.

    Each domain has 300 training, 60 validation and 220 test examples (print and street: 400 test examples), balanced across
    classes. Domains and splits share no handwriting samples, and splits share no photograph regions. They may share writers, whom
    scikit-learn does not identify. The splits of a domain share fonts but differ in their random draws; print and street share no
    font. The result is bit-identical on one machine with the same versions of NumPy, Pillow, scikit-learn and matplotlib.

    Args:
        per_domain: Training examples per domain, 10 to 300. Smaller sets are contained in larger ones; validation and test examples
            do not depend on it.
    """
    if not len(CLASSES) <= per_domain <= MAX_TRAINING_EXAMPLES:
        raise OptionError(
            f"digits-mini: per_domain must be between {len(CLASSES)} (one per class) and {MAX_TRAINING_EXAMPLES} training examples, "
            f"got {per_domain}."
        )
    material = recipes.load_material()
    return DataSet(
        name="digits-mini",
        classes=CLASSES,
        domains=tuple(_domain(name, material, per_domain) for name in DOMAINS),
        default_model="small_cnn",
        trains_with=TrainsWith(lr=0.05),
        source=SOURCE,
    )


def class_order(domain: str, split: str) -> Indices:
    """Return the labels of a split in random order. Each block of ten has every class once, so that any prefix is balanced."""
    rounds = (HANDWRITTEN_PER_CLASS if domain in HANDWRITTEN else PRINTED_PER_CLASS)[split]
    rng = _generator(_ORDER, domain, split)
    return np.concatenate([rng.permutation(len(CLASSES)) for _ in range(rounds)])


def handwriting_indices(labels: Indices) -> dict[str, dict[str, Indices]]:
    """Assign scikit-learn's digits to domains and splits, in the order of ``class_order``."""
    rng = np.random.default_rng((_RECIPE, _HANDWRITING))
    unused = [rng.permutation(np.flatnonzero(labels == digit)).tolist() for digit in range(len(CLASSES))]
    return {
        domain: {split: np.array([unused[digit].pop() for digit in class_order(domain, split)]) for split in SPLITS}
        for domain in HANDWRITTEN
    }


def photo_regions(photographs: int, height: int, width: int) -> dict[str, list[Box]]:
    """Assign the blocks of the photographs to splits."""
    blocks = recipes.photo_blocks(photographs, height, width)
    order = np.random.default_rng((_RECIPE, _PHOTO_REGIONS)).permutation(len(blocks)).tolist()
    ends = np.rint(np.cumsum(list(PHOTO_BLOCK_FRACTIONS.values())) * len(blocks)).astype(int).tolist()
    return {
        split: [blocks[place] for place in order[start:end]]
        for split, start, end in zip(PHOTO_BLOCK_FRACTIONS, [0, *ends], ends, strict=False)
    }


def _generator(purpose: int, domain: str, split: str, position: int = 0) -> np.random.Generator:
    """Return a separate generator for each use, so that an image does not depend on the number of images before it."""
    return np.random.default_rng((_RECIPE, purpose, DOMAINS.index(domain), SPLITS.index(split), position))


def _domain(name: str, material: Material, per_domain: int) -> Domain:
    splits = {split: _examples(name, split, material, per_domain if split == "train" else None) for split in SPLITS}
    return Domain(name, train=splits["train"], validation=splits["validation"], test=splits["test"])


def _examples(domain: str, split: str, material: Material, limit: int | None) -> ArrayExamples:
    labels = class_order(domain, split)[:limit]
    draw = _painter(domain, split, material)
    pictures = np.stack([draw(position, int(label)) for position, label in enumerate(labels)])
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous()
    return ArrayExamples(x, torch.from_numpy(labels.copy()))


def _painter(domain: str, split: str, material: Material) -> Callable[[int, int], Pixels]:
    """Return a function that draws the image for a position and its label."""

    def generator(position: int) -> np.random.Generator:
        return _generator(_PICTURES, domain, split, position)

    if domain == "print":
        return lambda position, label: recipes.print_(label, material.fonts, generator(position))
    if domain == "street":
        return lambda position, label: recipes.street(label, material.fonts, generator(position))
    strokes = material.handwriting[handwriting_indices(material.labels)[domain][split]]
    if domain == "pen":
        return lambda position, _: recipes.pen(strokes[position])
    if domain == "post":
        return lambda position, _: recipes.post(strokes[position], generator(position))
    photographs = material.photographs
    blocks = photo_regions(*photographs.shape[:3])[split]
    return lambda position, _: recipes.photo(strokes[position], photographs, blocks, generator(position))


data_sets.add(digits_mini)
