"""From image files to uint8 arrays of the shape (n, 3, side, side).

Images are turned as their EXIF tag says. Grey, palette, CMYK and other modes become RGB; transparency is dropped. *Deep*
images, which have more than 8 bits or are floating-point, are scaled to 8 bits by one rule for all that are read together
(those of a domain), so that their brightnesses stay comparable; see ``deep_range``. Files of whole numbers and files of floating-point
ones are apart: their values have other units.
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

from polyfed.data.store.archives import FileTree
from polyfed.data.store.cache import Growing
from polyfed.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
USUAL_BITS = (8, 10, 12, 14, 16)
"""Depths of cameras and scanners; the files of all but the first have 16 bits."""
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
    """Whether a file's name ends like an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def decoded(content: bytes, name: str) -> Image.Image:
    """An image in its own mode, decoded to the end and turned as its EXIF tag says; of a moving one the first frame."""
    try:
        # Pillow warns of oddities in a file and goes on; an image that cannot be read is an error all the same.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            return image.copy() if upright is None else upright
    except UnidentifiedImageError as error:  # its own words name an address in memory
        raise DataError(f"{name} cannot be read as an image: it is in no format that Pillow knows.") from error
    except _UNREADABLE as error:
        raise DataError(f"{name} cannot be read as an image: {error}.") from error


def opened(content: bytes, name: str) -> Image.Image:
    """An image as RGB; a deep one is scaled by its own values."""
    image = decoded(content, name)
    if image.mode not in DEEP_MODES:
        return _rgb(image, name)
    values = _deep_values(image, name)
    alone = DeepRanges()
    alone.widen(image.mode, values)
    return Image.fromarray(_scaled(values, alone.limits(image.mode))).convert("RGB")


def own_pixels(image: Image.Image) -> NDArray[Any]:
    """The pixels by which images are compared: RGB, and the values of a deep one as they are, since scaled alone two may look the same."""
    return np.asarray(image if image.mode in DEEP_MODES else image.convert("RGB"))


def deep_range(lowest: float, highest: float) -> tuple[float, float]:
    """Which values of deep images become black and white, from the lowest and the highest value of all that are read together.

    Values from 0 to 1 are shares of white. Other values from 0 on are whole numbers of a usual depth: 255, 1023, 4095, 16383
    or 65535 is white, the first that holds the highest value. Anything else runs from the lowest value to the highest.

    >>> deep_range(0, 3071), deep_range(0.0, 0.8), deep_range(-1000, 1500)
    ((0, 4095), (0, 1), (-1000, 1500))
    """
    if lowest >= 0 and highest <= 1:
        return 0, 1
    white = next((2**bits - 1 for bits in USUAL_BITS if highest < 2**bits), None)
    return (0, white) if lowest >= 0 and white is not None else (lowest, highest)


def decode(content: bytes, name: str, size: int, middle_square: bool = False) -> NDArray[np.uint8]:
    """An image as (3, size, size), resized bilinearly if it has another size.

    Args:
        content: The bytes of the file.
        name: What to call it in messages.
        size: Side of the result.
        middle_square: Cut the largest square out of the middle first, instead of changing the aspect ratio.
    """
    return np.asarray(fitted(opened(content, name), size, middle_square)).transpose(2, 0, 1)


def fitted(image: Image.Image, size: int | tuple[int, int], middle_square: bool = False) -> Image.Image:
    """The image at this side, or height and width; cut to its middle square first if asked for. Training and prediction both use it."""
    height, width = (size, size) if isinstance(size, int) else size
    if middle_square and image.width != image.height:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)


def decode_all(
    tree: FileTree, names: Sequence[str], size: int, unreadable: list[str], middle_square: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All images that can be read, and the positions of their names.

    Args:
        tree: Where the files are.
        names: The files, in the order wanted.
        size: Side of the results.
        unreadable: Gets a sentence for each image that cannot be read.
        middle_square: As for ``decode``.
    """
    growing = Growing((len(names), 3, size, size))
    (images,) = growing.arrays
    readable: list[int] = []
    fitting = Fitting((size, size), middle_square)
    deep: dict[int, str] = {}
    for position, name in enumerate(names):
        row = len(readable)
        try:
            found = fitting.take(tree.read(name), name)
        except DataError as error:
            unreadable.append(str(error))
            continue
        if found is None:
            deep[row] = name
        else:
            images[row] = found
        readable.append(position)
        growing.let_go_after(row)
    for row, name in deep.items():
        images[row] = fitting.scaled(tree.read(name), name)
        growing.let_go_after(row)
    return images[: len(readable)], np.array(readable, np.int64)


class DeepRanges:
    """The lowest and the highest value of the deep images that are read together, whole numbers and floating-point ones apart."""

    def __init__(self) -> None:
        self._found: dict[bool, tuple[float, float]] = {}

    def widen(self, mode: str, values: NDArray[np.float32]) -> None:
        """Take the values of an image in this mode into account."""
        lowest, highest = self._found.get(mode == "F", (np.inf, -np.inf))
        self._found[mode == "F"] = min(lowest, float(values.min())), max(highest, float(values.max()))

    def limits(self, mode: str) -> tuple[float, float]:
        """The values that become black and white in images of this mode."""
        return deep_range(*self._found[mode == "F"])


class Fitting:
    """Images that are read together, each brought to one size.

    Deep ones are read a second time, when the values of all are known: kept until then, those of a large set would fill the memory.
    """

    def __init__(self, size: tuple[int, int], middle_square: bool = False) -> None:
        self.size, self.middle_square = size, middle_square
        self.ranges = DeepRanges()
        self.last_size = (0, 0)
        """Width and height of the image that was taken last, before it was fitted."""

    def take(self, content: bytes, name: str) -> NDArray[np.uint8] | None:
        """An image as (3, height, width); None for a deep one, which ``scaled`` gives in the end."""
        image = decoded(content, name)
        self.last_size = image.size
        if image.mode in DEEP_MODES:
            self.ranges.widen(image.mode, _deep_values(image, name))
            return None
        return np.asarray(fitted(_rgb(image, name), self.size, self.middle_square)).transpose(2, 0, 1)

    def scaled(self, content: bytes, name: str) -> NDArray[np.uint8]:
        """A deep image as grey (1, height, width), by the range of all that were taken."""
        image = decoded(content, name)
        values = Image.fromarray(_deep_values(image, name))
        return _scaled(np.asarray(fitted(values, self.size, self.middle_square)), self.ranges.limits(image.mode))[None]


def tiles(content: bytes, name: str, side: int, count: int) -> NDArray[np.uint8]:
    """The first tiles of a mosaic, in row-major order, as (count, 3, side, side)."""
    mosaic = np.asarray(opened(content, name))
    rows, columns = mosaic.shape[0] // side, mosaic.shape[1] // side
    if rows * columns < count or mosaic.shape[0] % side or mosaic.shape[1] % side:
        raise DataError(f"{name} is {mosaic.shape[1]}x{mosaic.shape[0]} pixels; expected at least {count} tiles of {side}x{side}.")
    cut = mosaic.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
    return cut.reshape(-1, 3, side, side)[:count]


def resized(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Arrays (n, 3, height, width) at another side, each resized bilinearly by itself."""
    if images.shape[2:] == (size, size):
        return images
    result = np.empty((len(images), 3, size, size), np.uint8)
    for position, image in enumerate(images):
        smaller = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).resize((size, size), Image.Resampling.BILINEAR)
        result[position] = np.asarray(smaller).transpose(2, 0, 1)
    return result


def colour(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Grey (n, height, width) or colour (n, height, width, 3) arrays as (n, 3, size, size); grey is repeated."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise DataError(f"Images have the shape {images.shape} and type {images.dtype}; expected bytes (n, height, width[, 3]).")
    if images.ndim == 3:
        images = images[..., None]
    if images.shape[3] == 1:
        images = np.repeat(images, 3, axis=3)
    return resized(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), size)


def _rgb(image: Image.Image, name: str) -> Image.Image:
    try:
        return (image.convert("RGBA") if image.mode == "P" else image).convert("RGB")
    except _UNREADABLE as error:
        raise DataError(f"{name} has the colours {image.mode}, which cannot be made RGB: {error}.") from error


def _deep_values(image: Image.Image, name: str) -> NDArray[np.float32]:
    values = np.asarray(image).astype(np.float32)
    if not np.isfinite(values).all():
        raise DataError(f"{name} cannot be used as an image: some of its values are not finite.")
    return values


def _scaled(values: NDArray[np.float32], limits: tuple[float, float]) -> NDArray[np.uint8]:
    black, white = limits
    shares: NDArray[np.float32] = (values - black) / max(white - black, 1e-12)
    grey: NDArray[np.uint8] = np.rint(shares.clip(0, 1) * 255).astype(np.uint8)
    return grey
