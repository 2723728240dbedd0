"""A small U-Net with batch normalisation, quick on one processor core; for segmentation without any extra package."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from polyfed.errors import ModelError
from polyfed.models import models
from polyfed.models.blocks import padded_to

STRIDE = 8


class SmallUNet(nn.Module):
    """Three halvings and three doublings with a bridge at each size (Ronneberger et al. 2015, far smaller), and a 1x1 head.

    Images of any size are padded to a multiple of 8, and the logits cut back.
    """

    def __init__(self, classes: int, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        widths = (width, width, 2 * width, 4 * width)
        self.enter = _block(channels, width, stride=1)
        self.down = nn.ModuleList(_block(a, b, stride=2) for a, b in pairwise(widths))
        self.enlarge = nn.Upsample(scale_factor=2, mode="nearest")
        self.up = nn.ModuleList(_block(a + b, b, stride=1) for a, b in pairwise(widths[::-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (n, classes, height, width)."""
        height, width = x.shape[-2:]
        sizes = [self.enter(padded_to(x, STRIDE))]
        for shrink in self.down:
            sizes.append(shrink(sizes[-1]))
        found = sizes.pop()
        for grow in self.up:
            found = grow(torch.cat([self.enlarge(found), sizes.pop()], dim=1))
        logits: Tensor = self.head(found[..., :height, :width])
        return logits


def _block(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


def small_unet(classes: int, input_shape: tuple[int, int, int], width: int = 16) -> SmallUNet:
    """A small U-Net for segmentation.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        width: Channels at full size; deeper ones have up to four times as many.
    """
    if width < 1:
        raise ModelError(f"small_unet: width is {width}; it must be at least 1.")
    return SmallUNet(classes, input_shape[0], width)


models.add(small_unet)
