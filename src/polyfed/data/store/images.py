"""Decode image files into uint8 arrays of shape (n, 3, side, side).

Images are rotated according to their EXIF tag. All colour modes are converted to RGB, and transparency is dropped. *Deep* images, which
have more than 8 bits or are floating-point, are scaled to 8 bits by one rule per domain, so that their brightness stays comparable; see
``deep_range`` and ``deep_ranges``.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from polyfed.core.data_types import DeepRange
from polyfed.data.store.archives import FileTree
from polyfed.data.store.cache import RowBuffer
from polyfed.data.store.deep_ranges import FLOATS, INTEGERS, Ranges
from polyfed.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
COMMON_BITS = (8, 10, 12, 14, 16)
"""Bit depths of cameras and scanners. All except the first are stored in 16 bits."""
_UNREADABLE = (
    OSError,
    SyntaxError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def is_image(name: str) -> bool:
    """Return True if the file name has an image suffix."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def decoded(content: bytes, name: str) -> Image.Image:
    """Decode an image completely in its original mode, rotated according to its EXIF tag. Use the first frame of an animation."""
    try:
        # Pillow warns about irregularities in a file. Unreadable images still raise an error.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            return image.copy() if upright is None else upright
    except UnidentifiedImageError as error:  # Pillow's message contains a memory address
        raise DataError(f"{name} cannot be read as an image: Pillow does not recognise the format.") from error
    except _UNREADABLE as error:
        raise DataError(f"{name} cannot be read as an image: {error}.") from error


def opened(content: bytes, name: str) -> Image.Image:
    """Return an image as RGB. A deep image is scaled by its own range."""
    image = decoded(content, name)
    if image.mode not in DEEP_MODES:
        return rgb(image, name)
    return Image.fromarray(_scaled(_deep_values(image, name), deep_range(*extremes(image, name)))).convert("RGB")


def number_kind(image: Image.Image) -> str:
    """Return the number type of a deep image."""
    return FLOATS if image.mode == "F" else INTEGERS


def extremes(image: Image.Image, name: str) -> DeepRange:
    """Return the lowest and the highest value of a deep image."""
    values = _deep_values(image, name)
    return float(values.min()), float(values.max())


def comparable_pixels(image: Image.Image) -> NDArray[Any]:
    """Return RGB pixels for comparison, or the unscaled values of a deep image, because scaling could make different images equal."""
    return np.asarray(image if image.mode in DEEP_MODES else image.convert("RGB"))


def deep_range(lowest: float, highest: float) -> DeepRange:
    """Return the values that are mapped to black and to white, given the range of all deep images that are read together.

    Values from 0 to 1 are fractions of white. Other non-negative values are integers of a common bit depth: white is the smallest of
    255, 1023, 4095, 16383 and 65535 that is not exceeded. Otherwise, the range from the lowest to the highest value is used.

    >>> deep_range(0, 3071), deep_range(0.0, 0.8), deep_range(-1000, 1500)
    ((0, 4095), (0, 1), (-1000, 1500))
    """
    if lowest >= 0 and highest <= 1:
        return 0, 1
    white = next((2**bits - 1 for bits in COMMON_BITS if highest < 2**bits), None)
    return (0, white) if lowest >= 0 and white is not None else (lowest, highest)


def decode(content: bytes, name: str, size: int, middle_square: bool = False) -> NDArray[np.uint8]:
    """Decode an image to (3, size, size), resized bilinearly. ``name`` is for error messages."""
    return np.asarray(fitted(opened(content, name), size, middle_square)).transpose(2, 0, 1)


def fitted(image: Image.Image, size: int | tuple[int, int], middle_square: bool = False) -> Image.Image:
    """Resize an image to a side or to height and width, optionally after cropping its central square, for training and prediction."""
    height, width = (size, size) if isinstance(size, int) else size
    if middle_square and image.width != image.height:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)


def deep_fitted(
    image: Image.Image, name: str, limits: DeepRange, size: int | tuple[int, int], middle_square: bool = False
) -> NDArray[np.uint8]:
    """Return a deep image as grey (height, width), resized and then scaled, for training and prediction."""
    return _scaled(np.asarray(fitted(Image.fromarray(_deep_values(image, name)), size, middle_square)), limits)


def decode_all(
    tree: FileTree, names: Sequence[str], resizer: Resizer, unreadable: list[str]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all readable images and the positions of their names. Add an error message to ``unreadable`` for each other image."""
    buffer = RowBuffer((len(names), 3, *resizer.size))
    (images,) = buffer.arrays
    readable: list[int] = []
    deep: dict[int, str] = {}
    for position, name in enumerate(names):
        row = len(readable)
        try:
            found = resizer.add(tree.read(name), name)
        except DataError as error:
            unreadable.append(str(error))
            continue
        if found is None:
            deep[row] = name
        else:
            images[row] = found
        readable.append(position)
        buffer.release_after(row)
    for row, name in deep.items():
        images[row] = resizer.scaled(tree.read(name), name)
        buffer.release_after(row)
    return images[: len(readable)], np.array(readable, np.int64)


class Resizer:
    """Resizes images that are read together.

    Deep images are read again once the range of all values is known, because keeping them until then would require too much memory.
    ``fixed`` has ranges that are not measured.
    """

    def __init__(self, size: tuple[int, int], middle_square: bool = False, fixed: Ranges | None = None) -> None:
        self.size, self.middle_square = size, middle_square
        self._fixed = fixed or {}
        self._extremes: dict[str, DeepRange] = {}
        self.last_size = (0, 0)
        """Original width and height of the last image."""

    def add(self, content: bytes, name: str) -> NDArray[np.uint8] | None:
        """Return an image as (3, height, width), or None for a deep image, which ``scaled`` returns later."""
        image = decoded(content, name)
        self.last_size = image.size
        if image.mode in DEEP_MODES:
            lowest, highest = extremes(image, name)
            known = self._extremes.get(number_kind(image), (lowest, highest))
            self._extremes[number_kind(image)] = min(lowest, known[0]), max(highest, known[1])
            return None
        return np.asarray(fitted(rgb(image, name), self.size, self.middle_square)).transpose(2, 0, 1)

    @property
    def ranges(self) -> Ranges:
        """Ranges of the deep images added, by number type."""
        return {kind: self._fixed.get(kind) or deep_range(*found) for kind, found in self._extremes.items()}

    def scaled(self, content: bytes, name: str) -> NDArray[np.uint8]:
        """Return a deep image as grey (1, height, width), scaled by the range of all images added."""
        image = decoded(content, name)
        return deep_fitted(image, name, self.ranges[number_kind(image)], self.size, self.middle_square)[None]


def tiles(content: bytes, name: str, side: int, count: int) -> NDArray[np.uint8]:
    """Return the first tiles of a mosaic in row-major order, as (count, 3, side, side)."""
    mosaic = np.asarray(opened(content, name))
    rows, columns = mosaic.shape[0] // side, mosaic.shape[1] // side
    if rows * columns < count or mosaic.shape[0] % side or mosaic.shape[1] % side:
        raise DataError(f"{name} has {mosaic.shape[1]}x{mosaic.shape[0]} pixels; expected at least {count} tiles of {side}x{side}.")
    cut = mosaic.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    return cut.reshape(-1, 3, side, side)[:count]


def resized(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resize images (n, 3, height, width) bilinearly to squares."""
    if images.shape[2:] == (size, size):
        return images
    result = np.empty((len(images), 3, size, size), np.uint8)
    for position, image in enumerate(images):
        scaled = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).resize((size, size), Image.Resampling.BILINEAR)
        result[position] = np.asarray(scaled).transpose(2, 0, 1)
    return result


def colour(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Convert grey (n, height, width) or colour (n, height, width, 3) images to (n, 3, size, size). Grey is repeated."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise DataError(f"Images have shape {images.shape} and type {images.dtype}; expected bytes (n, height, width[, 3]).")
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[3] == 1:
        images = np.repeat(images, 3, axis=3)
    return resized(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), size)


def rgb(image: Image.Image, name: str) -> Image.Image:
    """Return an 8-bit image of any colour mode as RGB."""
    try:
        return (image.convert("RGBA") if image.mode == "P" else image).convert("RGB")
    except _UNREADABLE as error:
        raise DataError(f"{name} has the colour mode {image.mode}, which cannot be converted to RGB: {error}.") from error


def _deep_values(image: Image.Image, name: str) -> NDArray[np.float32]:
    values = np.asarray(image).astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(f"{name} cannot be used as an image: some values are NaN or infinite.")
    return values


def _scaled(values: NDArray[np.float32], limits: DeepRange) -> NDArray[np.uint8]:
    black, white = limits
    fractions: NDArray[np.float32] = (values - black) / max(white - black, 1e-12)
    grey: NDArray[np.uint8] = np.rint(fractions.clip(0, 1) * 255).astype(np.uint8)
    return grey
