"""A small convolutional network with batch norm that is fast on one CPU core."""

from __future__ import annotations

from torch import Tensor, nn

from polyfed.errors import ModelError
from polyfed.models import models

MIN_SIDE = 16
_GRID = 4


class SmallCNN(nn.Module):
    """Three blocks (strided convolution, batch norm, ReLU), a 4x4 feature grid and a linear head.

    The blocks have ``width // 2``, ``width`` and ``2 * width`` channels. Strided convolutions take a third of the time of full-size
    convolutions with pooling. The grid preserves positions: with global average pooling, the network learns far less from a few
    hundred digits.
    """

    def __init__(self, classes: int, channels: int = 3, width: int = 32) -> None:
        super().__init__()
        self.block1 = _block(channels, width // 2, kernel=5)
        self.block2 = _block(width // 2, width, kernel=3)
        self.block3 = _block(width, 2 * width, kernel=3)
        self.pool = nn.AdaptiveAvgPool2d(_GRID)
        self.head = nn.Linear(2 * width * _GRID**2, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.pool(self.block3(self.block2(self.block1(x)))).flatten(1)
        logits: Tensor = self.head(features)
        return logits


def _block(channels_in: int, channels_out: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride=2, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def small_cnn(classes: int, input_shape: tuple[int, int, int], width: int = 32) -> nn.Module:
    """Three convolutions with batch norm for small images; 34,714 parameters for ten classes and RGB images.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image; height and width at least 16.
        width: Channels of the middle block. The first block has half as many, the last twice as many.
    """
    channels, height, across = input_shape
    if min(height, across) < MIN_SIDE:
        raise ModelError(
            f"small_cnn needs images of at least {MIN_SIDE}x{MIN_SIDE} pixels, got {height}x{across}. "
            "Use larger images or another model."
        )
    if width < 2:
        raise ModelError(f"small_cnn: width must be at least 2, got {width}.")
    return SmallCNN(classes, channels, width)


models.add(small_cnn)
