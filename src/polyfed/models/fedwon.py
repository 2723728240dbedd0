"""The CNNs of FedWon, first used by FedBN: six layers for digits (Table 5), AlexNet for Office-Caltech-10 and DomainNet (Table 6)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from polyfed.core.data_types import TrainsWith
from polyfed.models import models
from polyfed.models.blocks import Headed, need_choice, need_size

VARIANTS = ("fedwon", "fedbn_original")


def six_layer_cnn(classes: int, input_shape: tuple[int, int, int], variant: str = "fedwon") -> nn.Module:
    """Three 5x5 convolutions with batch norm and three linear layers; 14,214,090 parameters at 28x28 and 10 classes.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        variant: "fedwon" has dropout 0.5 before the two hidden linear layers; "fedbn_original" has
            batch norm after them instead (five batch norms, 14,219,210 parameters).
    """
    need_choice("six_layer_cnn", "variant", variant, VARIANTS)
    need_size("six_layer_cnn", input_shape, 4)
    channels, height, width = input_shape
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (fan_in, fan_out) in enumerate([(channels, 64), (64, 64), (64, 128)], start=1):
        body[f"conv{number}"] = nn.Conv2d(fan_in, fan_out, 5, padding=2)
        body[f"bn{number}"] = nn.BatchNorm2d(fan_out)
        body[f"relu{number}"] = nn.ReLU()
        if number < 3:
            body[f"pool{number}"] = nn.MaxPool2d(2)
    body["flatten"] = nn.Flatten()
    flat = 128 * (height // 4) * (width // 4)
    for number, (fan_in, fan_out) in enumerate([(flat, 2048), (2048, 512)], start=4):
        add_hidden_layer(body, number, fan_in, fan_out, dropout=variant == "fedwon")
    return Headed(body, nn.Linear(512, classes))


def add_hidden_layer(body: OrderedDict[str, nn.Module], number: int, fan_in: int, fan_out: int, *, dropout: bool) -> None:
    """Append a hidden linear layer with dropout before it, or with batch norm after it."""
    if dropout:
        body[f"dropout{number}"] = nn.Dropout(0.5)
    body[f"fc{number}"] = nn.Linear(fan_in, fan_out)
    if not dropout:
        body[f"bn{number}"] = nn.BatchNorm1d(fan_out)
    body[f"relu{number}"] = nn.ReLU()


models.add(six_layer_cnn)


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
