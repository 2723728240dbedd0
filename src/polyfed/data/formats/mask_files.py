"""Decode pairs of images and masks once into memory-mapped arrays."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyfed.data.store.archives import FileTree
from polyfed.data.store.cache import Arrays, RowBuffer
from polyfed.data.store.deep_ranges import Ranges, range_arrays
from polyfed.data.store.domain_files import DomainFiles
from polyfed.data.store.images import Resizer
from polyfed.data.store.splits import Splits
from polyfed.errors import DataError
from polyfed.tasks.segmentation import IGNORED

LARGEST_DIFFERENCE = 0.05
"""Largest relative difference between the aspect ratios of an image and its mask. The sides of small masks are rounded."""
Pairs = Sequence[tuple[str, str]]
"""File names of the image and the mask of each example, in order."""
Meaning = Mapping[int, int]
"""Maps the values of mask files to classes. Other values are ignored in training and scores."""


def mask_files(
    domain: str,
    layout: str,
    tree: FileTree,
    pairs: Pairs,
    size: tuple[int, int],
    meaning: Meaning,
    split: Callable[[Pairs], Splits],
    fixed: Ranges | None = None,
) -> DomainFiles:
    """Return one domain of images with masks, not decoded yet. ``size`` is height and width. ``fixed`` has ranges of deep images."""
    return DomainFiles(
        domain=domain,
        layout=layout,
        recipe={
            "masks": 2,
            "size": size,
            "meaning": sorted(meaning.items()),
            "pairs": pairs,
            **({} if fixed is None else {"deep": fixed}),
        },
        files=tree.identity([name for pair in pairs for name in pair]),
        read=partial(_read, tree, pairs, size, meaning, fixed),
        split=lambda arrays: split(pairs),
        pairs=True,
    )


def pairs_by_domain(
    tree: FileTree,
    key: Callable[[str], tuple[bool, str, str] | None],
    order: Callable[[str], Any] = lambda name: name,
) -> dict[str, list[tuple[str, str]]]:
    """Return pairs of images and masks by domain. Files without a counterpart are skipped.

    ``key`` returns whether a file is a mask, its domain, and the name common to image and mask, or None for other files. ``order``
    returns the sort key for such a name.
    """
    found: dict[bool, dict[tuple[str, str], str]] = {False: {}, True: {}}
    for file in tree.names:
        if (known := key(file)) is not None:
            found[known[0]][known[1:]] = file
    domains: dict[str, list[tuple[str, str]]] = {}
    for both in sorted(found[False].keys() & found[True].keys(), key=lambda both: (both[0], order(both[1]))):
        domains.setdefault(both[0], []).append((found[False][both], found[True][both]))
    return domains


def _read(
    tree: FileTree, pairs: Pairs, size: tuple[int, int], meaning: Meaning, fixed: Ranges | None, unreadable: list[str]
) -> Arrays:
    """Decode all pairs. Add an error message to ``unreadable`` for each pair that cannot be read."""
    buffer = RowBuffer((len(pairs), 3, *size), (len(pairs), *size))
    x, y = buffer.arrays
    resizer = Resizer(size, fixed=fixed)
    deep: dict[int, str] = {}
    for place, (image, mask) in enumerate(pairs):
        try:
            found = resizer.add(tree.read(image), image)
            values = mask_image(tree.read(mask), mask)
            _require_same_shape(image, resizer.last_size, mask, values.size)
            y[place] = _mask_array(values, size, meaning)
        except DataError as error:
            y[place] = IGNORED
            unreadable.append(str(error))
            continue
        if found is None:
            deep[place] = image
        else:
            x[place] = found
        buffer.release_after(place)
    for place, image in deep.items():
        x[place] = resizer.scaled(tree.read(image), image)
        buffer.release_after(place)
    return {"x": x, "y": y, **range_arrays(resizer.ranges)}


def _require_same_shape(image: str, image_size: tuple[int, int], mask: str, mask_size: tuple[int, int]) -> None:
    """Reject a mask whose aspect ratio differs from that of its image. Sizes are widths and heights."""
    image_ratio, mask_ratio = (width / height for width, height in (image_size, mask_size))
    if abs(mask_ratio / image_ratio - 1) > LARGEST_DIFFERENCE:
        raise DataError(
            f"{mask} has {mask_size[0]}x{mask_size[1]} pixels, but its image {image} has {image_size[0]}x{image_size[1]} after EXIF "
            "rotation. They must have the same aspect ratio."
        )


def _mask_array(values: Image.Image, size: tuple[int, int], meaning: Meaning) -> NDArray[np.uint8]:
    """Convert a mask to classes (height, width), resized with nearest-neighbour interpolation."""
    if values.size != size[::-1]:
        values = values.resize(size[::-1], Image.Resampling.NEAREST)
    table = np.full(256, IGNORED, np.uint8)
    for value, label in meaning.items():
        table[value] = label
    found: NDArray[np.uint8] = table[np.asarray(values)]
    return found


def mask_image(content: bytes, name: str) -> Image.Image:
    """Return a mask file with one byte per pixel. The value of a palette colour is its index."""
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
            f"{name} is a mask with the colour mode {mask.mode}; expected one byte per pixel (grey or palette), which is its class."
        )
    return mask
