"""Images from elsewhere as inputs of a run: cut and resized as the run's own were. ``predict`` and ``evaluate`` both go by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from polyfed.core.data_types import Federation
from polyfed.data.store.images import fitted, opened
from polyfed.errors import DataError


@dataclass(frozen=True)
class ImageInputs:
    """The images that a run takes.

    Args:
        channels: 3 for colour, 1 for grey.
        height: in pixels.
        width: in pixels.
        middle_square: the middle square is cut out of each image before it is resized; else it is resized whatever its aspect ratio.
    """

    channels: int
    height: int
    width: int
    middle_square: bool = False

    @classmethod
    def of(cls, federation: Federation) -> ImageInputs:
        """The images of a federation; one of something else than images is refused."""
        x, _ = federation.clients[0].train.batch(slice(0, 1))
        if x.dim() != 4 or x.dtype != torch.uint8:
            raise DataError(
                f"The inputs of this run are not images (shape {tuple(x.shape[1:])}, {x.dtype}), so images cannot be given to it."
            )
        channels, height, width = map(int, x.shape[1:])
        if channels not in (1, 3):
            raise DataError(f"The inputs of this run have {channels} channels; images have 1 or 3.")
        return cls(channels, height, width, federation.preparation.middle_square)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.channels, self.height, self.width

    def options(self) -> dict[str, int | bool]:
        """The options by which data sets read their files in this way; each data set has some of them."""
        sides = {"height": self.height, "width": self.width}
        return {"size": max(self.height, self.width), "middle_square": self.middle_square, **sides}

    def tensor(self, images: Any) -> Tensor:
        """Images as bytes in the shape of the run's inputs.

        Args:
            images: a uint8 tensor or array (n, channels, height, width) or (n, height, width, channels); or image files, PIL images, or
                single such arrays, in a list. Those of another size are resized.
        """
        if isinstance(images, str | Path | Image.Image):
            images = [images]
        if isinstance(images, Tensor | np.ndarray):
            array = torch.as_tensor(images)
            images = [array] if array.dim() == 3 else list(array)
        if not isinstance(images, Sequence) or not images:
            raise DataError(
                "There are no images. Give a uint8 array (n, channels, height, width), or a list of files or PIL images."
            )
        return torch.stack([self.one(image) for image in images])

    def one(self, image: Any) -> Tensor:
        """One image as bytes in the shape of the run's inputs, made so by what reads training images."""
        if isinstance(image, str | Path):
            image = read_file(str(image))
        if isinstance(image, Tensor | np.ndarray):
            image = as_pil(torch.as_tensor(image))
        if not isinstance(image, Image.Image):
            raise DataError(f"Cannot use {type(image).__name__} as an image: give a file, a PIL image, or a uint8 array.")
        image = fitted(image.convert("L" if self.channels == 1 else "RGB"), (self.height, self.width), self.middle_square)
        array = np.array(image).reshape(self.height, self.width, self.channels)
        return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def read_file(file: str) -> Image.Image:
    """An image file, opened."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    return opened(content, file)


def as_pil(image: Tensor) -> Image.Image:
    """A uint8 array of three dimensions, channels first or last, as a PIL image."""
    if image.dtype != torch.uint8 or image.dim() != 3:
        raise DataError(f"An image is a uint8 array of three dimensions, found {image.dtype} of shape {tuple(image.shape)}.")
    if image.shape[0] in (1, 3) and image.shape[2] not in (1, 3):
        image = image.permute(1, 2, 0)
    if image.shape[2] not in (1, 3):
        raise DataError(f"An image has 1 or 3 channels, found the shape {tuple(image.shape)}.")
    array = image.contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
