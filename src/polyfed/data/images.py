"""From image files to uint8 arrays of the shape (n, 3, side, side)."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from polyfed.data.archives import FileTree
from polyfed.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
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


def opened(content: bytes, name: str) -> Image.Image:
    """An image as RGB, decoded to the end; of a moving one the first frame."""
    try:
        # Pillow warns of oddities in a file and goes on; an image that cannot be read is an error all the same.
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
            image.load()
            return _rgb(image)
    except _UNREADABLE as error:
        raise DataError(f"{name} cannot be read as an image: {error}.") from error


def decode(content: bytes, name: str, size: int, middle_square: bool = False) -> NDArray[np.uint8]:
    """An image as (3, size, size), resized bilinearly if it has another size.

    Args:
        content: The bytes of the file.
        name: What to call it in messages.
        size: Side of the result.
        middle_square: Cut the largest square out of the middle first, instead of changing the aspect ratio.
    """
    image = opened(content, name)
    if middle_square and image.width != image.height:
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


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
    images = np.empty((len(names), 3, size, size), np.uint8)
    readable: list[int] = []
    for position, name in enumerate(names):
        try:
            images[len(readable)] = decode(tree.read(name), name, size, middle_square)
        except DataError as error:
            unreadable.append(str(error))
        else:
            readable.append(position)
    return images[: len(readable)], np.array(readable, np.int64)


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


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16B", "I;16L"):
        # Pillow would clip sixteen-bit grey at 255 and leave white.
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 256).astype(np.uint8)).convert("RGB")
    if image.mode == "P":
        image = image.convert("RGBA")
    return image.convert("RGB")
