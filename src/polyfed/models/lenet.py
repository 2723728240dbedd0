"""A LeNet-like CNN for CIFAR-10 (FixBN; its paper gives no table, so this is the usual shape)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from polyfed.models import models
from polyfed.models.blocks import Headed, need_choice, need_size, norm_or_not


def lenet(classes: int, input_shape: tuple[int, int, int], norm: str = "batch") -> nn.Module:
    """Two 5x5 convolutions with pooling, then linear layers of 120 and 84.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        norm: "batch" after each convolution, or "none". Other norms are put in by a method's surgery.
    """
    need_choice("lenet", "norm", norm, ("batch", "none"))
    need_size("lenet", input_shape, 16)
    channels, height, width = input_shape
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate([(channels, 6), (6, 16)], start=1):
        body[f"conv{number}"] = nn.Conv2d(fan_in, fan_out, 5)
        for layer in norm_or_not(norm, fan_out):
            body[f"bn{number}"] = layer
        body[f"relu{number}"] = nn.ReLU()
        body[f"pool{number}"] = nn.MaxPool2d(2)
    body["flatten"] = nn.Flatten()
    flat = 16 * _after_two_blocks(height) * _after_two_blocks(width)
    for number, (fan_in, fan_out) in enumerate([(flat, 120), (120, 84)], start=3):
        body[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        body[f"relu{number}"] = nn.ReLU()
    return Headed(body, nn.Linear(84, classes))


def _after_two_blocks(side: int) -> int:
    """The side of an image after two unpadded 5x5 convolutions with pooling."""
    return ((side - 4) // 2 - 4) // 2


models.add(lenet, batch_norm={"norm": "batch"})
