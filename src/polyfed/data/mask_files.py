"""Images with a mask each: pairs of files, decoded once into memory-mapped arrays, and the declaration of data sets made of them."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from polyfed.core.data_types import DataSet, Domain
from polyfed.core.tasks.known import SEGMENTATION
from polyfed.core.tasks.segmentation import IGNORED
from polyfed.core.tasks.task import Task
from polyfed.data.archives import FileTree
from polyfed.data.augment_pairs import CropAndFlip
from polyfed.data.cache import Arrays, Growing, cached
from polyfed.data.declaration import DataOption, Declaration
from polyfed.data.domain_files import some_of
from polyfed.data.images import Fitting
from polyfed.data.row_examples import RowExamples
from polyfed.data.splits import Splits
from polyfed.errors import DataError, OptionError

LARGEST_DIFFERENCE = 0.05
"""By how much the aspect ratios of an image and its mask may differ: sides of small masks are rounded."""
OF_PAIRS = ("crop", "flip")
"""Options that decide how pairs are augmented."""
Meaning = Mapping[int, int]
"""From the values of mask files to classes; values it does not name are left out of training and scores."""


@dataclass(frozen=True)
class MaskFiles:
    """One domain of images with masks, not decoded yet.

    Args:
        domain: The domain's name.
        layout: The layout it was found in.
        tree: Where the files are.
        pairs: Names of the image and the mask of each example, in order.
        size: Height and width of the results.
        meaning: The class of each value in the mask files.
        split: From the number of pairs to the rows of each split.
        problems: What is already known to be wrong, a sentence each.
        middle_square: False: whole images are resized, with their masks.
    """

    domain: str
    layout: str
    tree: FileTree
    pairs: Sequence[tuple[str, str]]
    size: tuple[int, int]
    meaning: Meaning
    split: Callable[[Sequence[tuple[str, str]]], Splits]
    problems: tuple[str, ...] = ()
    middle_square: bool = False

    def load(self) -> Domain:
        """The domain, with images and masks memory-mapped."""
        if self.problems:
            raise DataError(some_of(self.problems))
        recipe = {
            "masks": 2,
            "domain": self.domain,
            "size": self.size,
            "meaning": sorted(self.meaning.items()),
            "pairs": self.pairs,
        }
        names = [name for pair in self.pairs for name in pair]
        arrays = cached(recipe, self.tree.identity(names), self._decoded)
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        splits = {split: RowExamples(x, y, torch.from_numpy(rows)) for split, rows in self.split(self.pairs).items()}
        return Domain(self.domain, splits["train"], splits["test"], splits.get("validation"))

    def count(self, classes: int, unreadable: list[str]) -> dict[str, tuple[int, ...]]:
        """Images by split, every pair decoded again, past the cache; an image has no class, so there is one number for all."""
        self.read(unreadable)
        splits = {"all": np.arange(len(self.pairs)), **self.split(self.pairs)}
        return {split: (len(rows),) for split, rows in splits.items()}

    def read(self, unreadable: list[str]) -> Arrays:
        """Decode now; a pair that cannot be read adds a sentence to ``unreadable``."""
        height, width = self.size
        growing = Growing((len(self.pairs), 3, height, width), (len(self.pairs), height, width))
        x, y = growing.arrays
        fitting = Fitting(self.size)
        deep: dict[int, str] = {}
        for place, (image, mask) in enumerate(self.pairs):
            try:
                found = fitting.take(self.tree.read(image), image)
                values = mask_image(self.tree.read(mask), mask)
                require_same_shape(image, fitting.last_size, mask, values.size)
                y[place] = mask_array(values, self.size, self.meaning)
            except DataError as error:
                y[place] = IGNORED
                unreadable.append(str(error))
                continue
            if found is None:
                deep[place] = image
            else:
                x[place] = found
            growing.let_go_after(place)
        for place, image in deep.items():
            x[place] = fitting.scaled(self.tree.read(image), image)
            growing.let_go_after(place)
        return {"x": x, "y": y}

    def _decoded(self) -> Arrays:
        unreadable: list[str] = []
        arrays = self.read(unreadable)
        if unreadable:
            count = f"{len(unreadable)} pair{'s' * (len(unreadable) != 1)}"
            raise DataError(f"{self.domain}: {count} cannot be read. {some_of(unreadable)}")
        return arrays


def require_same_shape(image: str, image_size: tuple[int, int], mask: str, mask_size: tuple[int, int]) -> None:
    """Refuse a mask of another aspect ratio than its image: resized to it, it would show other pixels. Sizes are widths and heights."""
    image_ratio, mask_ratio = (width / height for width, height in (image_size, mask_size))
    if abs(mask_ratio / image_ratio - 1) > LARGEST_DIFFERENCE:
        raise DataError(
            f"{mask} has {mask_size[0]}x{mask_size[1]} pixels and its image {image} {image_size[0]}x{image_size[1]}, turned as its EXIF tag "
            "says: they cannot show the same."
        )


def mask_array(values: Image.Image, size: tuple[int, int], meaning: Meaning) -> NDArray[np.uint8]:
    """A mask as classes (height, width), resized to the nearest pixel if it has another size."""
    if values.size != size[::-1]:
        values = values.resize(size[::-1], Image.Resampling.NEAREST)
    table = np.full(256, IGNORED, np.uint8)
    for value, label in meaning.items():
        table[value] = label
    found: NDArray[np.uint8] = table[np.asarray(values)]
    return found


def mask_image(content: bytes, name: str) -> Image.Image:
    """A mask file with one byte a pixel; colours of a palette are their places in it."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
            image.load()
            mask = image.copy()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} cannot be read as a mask: {error}.") from error
    if mask.mode == "1":
        return mask.convert("L").point(lambda value: value // 255)
    if mask.mode not in ("L", "P"):
        raise DataError(
            f"{name} is a mask of the kind {mask.mode}; expected one byte a pixel (grey, or a palette), which is the pixel's class."
        )
    return mask


def height_option(default: int, text: str) -> DataOption:
    """``height``: of the images."""

    def check(owner: str, height: int) -> None:
        if height < 1:
            raise OptionError(f"{owner}: height is {height}; it must be at least 1.")

    return DataOption("height", default, text, check, lambda height: f"{height} pixels high")


def crop_options(crop: int) -> tuple[DataOption, DataOption]:
    """``crop`` and ``flip``: random crops and flips of training batches, of image and mask together."""

    def check(owner: str, side: int) -> None:
        if side < 0:
            raise OptionError(f"{owner}: crop is {side}; it must be 0 (none) or larger.")

    return (
        DataOption("crop", crop, "Side of the random crops in training; 0: whole images.", check),
        DataOption("flip", True, "Mirror training images and their masks with a chance of one half."),
    )


def pair_augmentation(crop: int, flip: bool) -> CropAndFlip | None:
    """The augmentation of these options, where they ask for one."""
    return CropAndFlip(crop, flip) if crop or flip else None


@dataclass(frozen=True)
class MaskDeclaration(Declaration):
    """A data set of images with masks: its training batches are cropped and flipped with their masks."""

    task: Task = SEGMENTATION

    def build(self, root: str, **chosen: Any) -> DataSet:
        """The data set in a folder, with a value for every option."""
        found = super().build(root, **chosen)
        pairs = pair_augmentation(chosen["crop"], chosen["flip"])
        return dataclasses.replace(found, preparation=dataclasses.replace(found.preparation, augment_pairs=pairs))

    def sources(self, root: str, **options: Any) -> Sequence[Any]:
        """The domains under a folder; how pairs are augmented has no part in it."""
        return super().sources(root, **{name: value for name, value in options.items() if name not in OF_PAIRS})
