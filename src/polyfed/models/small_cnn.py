"""A small convolutional network with batch normalisation, quick on one processor core."""

from __future__ import annotations

from torch import Tensor, nn

from polyfed.errors import ModelError
from polyfed.models import models

SMALLEST_SIDE = 16
_GRID = 4


class SmallCNN(nn.Module):
    """Three blocks (convolution that halves, batch normalisation, ReLU), a 4x4 grid of features, a linear head.

    The blocks have ``width // 2``, ``width`` and ``2 * width`` channels. The convolutions halve the
    picture themselves, which takes a third of the time of pooling after full-size ones. The grid keeps
    where things are: a mean over all places learns far less from a few hundred digits in as many steps.
    """

    def __init__(self, classes: int, channels: int = 3, width: int = 32) -> None:
        super().__init__()
        self.block1 = _block(channels, width // 2, kernel=5)
        self.block2 = _block(width // 2, width, kernel=3)
        self.block3 = _block(width, 2 * width, kernel=3)
        self.pool = nn.AdaptiveAvgPool2d(_GRID)
        self.head = nn.Linear(2 * width * _GRID**2, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (n, classes)."""
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
    """A batch-norm network of three convolutions for small images: 34,714 parameters for ten classes in colour.

    Args:
        classes: Number of classes.
        input_shape: Channels, height, width of an input; height and width at least 16.
        width: Channels of the middle block; the first has half, the last has twice as many.
    """
    channels, height, across = input_shape
    if min(height, across) < SMALLEST_SIDE:
        raise ModelError(
            f"small_cnn halves its input three times: inputs are {height}x{across}, at least {SMALLEST_SIDE}x{SMALLEST_SIDE} works."
        )
    if width < 2:
        raise ModelError(f"small_cnn: width is {width}; at least 2 works, as the first block has half of it.")
    return SmallCNN(classes, channels, width)


models.add(small_cnn)
