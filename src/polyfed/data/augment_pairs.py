"""Random crops and flips that move an image and its mask together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.errors import DataError


@dataclass(frozen=True)
class CropAndFlip:
    """Cut a square out of each image at a place of its own, and mirror it with a chance of one half; masks likewise.

    Draws from torch's default generator, as all augmentations do.

    Attributes:
        side: Side of the square; 0: nothing is cut.
        flip: Whether images are mirrored, left to right.
    """

    side: int = 0
    flip: bool = True

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Augment a batch of images (n, channels, height, width) and masks (n, height, width)."""
        if x.shape[-2:] != y.shape[-2:]:
            raise DataError(f"Images of {tuple(x.shape[-2:])} pixels and masks of {tuple(y.shape[-2:])} cannot be moved together.")
        if self.side:
            x, y = self.cropped(x, y)
        if self.flip:
            chosen = (torch.rand(len(x)) < 0.5).to(x.device)
            x = torch.where(chosen.view(-1, 1, 1, 1), x.flip(-1), x)
            y = torch.where(chosen.view(-1, 1, 1), y.flip(-1), y)
        return x, y

    def cropped(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The squares that were drawn; of a smaller image all there is along that side."""
        count, _, height, width = x.shape
        tall, wide = min(self.side, height), min(self.side, width)
        top, left = torch.randint(0, height - tall + 1, (count,)), torch.randint(0, width - wide + 1, (count,))
        rows = (top[:, None] + torch.arange(tall)).to(x.device)[:, :, None]
        columns = (left[:, None] + torch.arange(wide)).to(x.device)[:, None, :]
        images = torch.arange(count, device=x.device)[:, None, None]
        # Channels end up last when indices stand on both sides of their slice.
        return x[images, :, rows, columns].permute(0, 3, 1, 2).contiguous(), y[images, rows, columns]
