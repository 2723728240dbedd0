"""The AlexNet variant for Office-Caltech-10 and DomainNet (FedWon, Table 6; first used by FedBN)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from polyfed.core.data_types import TrainsWith
from polyfed.models import models
from polyfed.models.blocks import Headed, need_choice, need_size
from polyfed.models.six_layer_cnn import VARIANTS, add_hidden_layer

CONVOLUTIONS = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
"""Output channels, kernel, stride and padding."""
POOLED_AFTER = (1, 2, 5)


def alexnet_fedwon(classes: int, input_shape: tuple[int, int, int], variant: str = "fedwon") -> nn.Module:
    """AlexNet with batch norm after each convolution; 57,047,114 parameters with 10 classes at any image size from 63.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        variant: "fedwon" has dropout 0.5 before the two hidden linear layers; "fedbn_original" has
            batch norm after them instead.
    """
    need_choice("alexnet_fedwon", "variant", variant, VARIANTS)
    need_size("alexnet_fedwon", input_shape, 63)
    body: OrderedDict[str, nn.Module] = OrderedDict()
    fan_in = input_shape[0]
    for number, (fan_out, kernel, stride, padding) in enumerate(CONVOLUTIONS, start=1):
        body[f"conv{number}"] = nn.Conv2d(fan_in, fan_out, kernel, stride, padding)
        body[f"bn{number}"] = nn.BatchNorm2d(fan_out)
        body[f"relu{number}"] = nn.ReLU()
        if number in POOLED_AFTER:
            body[f"pool{number}"] = nn.MaxPool2d(3, 2)
        fan_in = fan_out
    body["average"] = nn.AdaptiveAvgPool2d(6)
    body["flatten"] = nn.Flatten()
    add_hidden_layer(body, 7, 256 * 6 * 6, 4096, dropout=variant == "fedwon")
    add_hidden_layer(body, 8, 4096, 4096, dropout=variant == "fedwon")
    return Headed(body, nn.Linear(4096, classes))


models.add(alexnet_fedwon, trains_with=TrainsWith(lr=0.01))
