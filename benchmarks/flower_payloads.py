"""Models whose state is 1, 44 or 228 MB of float32 and whose training costs next to nothing.

44 MB are a ResNet-18, 228 MB an AlexNet. The file is copied into the app folder of ``bench_flower.py``, hence reaches the nodes.
"""

from __future__ import annotations

import math

from torch import nn

BYTES_OF_A_NUMBER = 4


def of_size(size: int, classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """One wide layer and a head, together as near to ``size`` bytes as whole columns allow."""
    inputs = math.prod(input_shape)
    width = round((size / BYTES_OF_A_NUMBER - classes) / (inputs + 1 + classes))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))


def megabytes_1(classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return of_size(1_000_000, classes, input_shape)


def megabytes_44(classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return of_size(44_000_000, classes, input_shape)


def megabytes_228(classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return of_size(228_000_000, classes, input_shape)


def resnet_20(classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """116 small tensors, 1.1 MB."""
    from polyfed.models import models

    model: nn.Module = models.build("resnet20", classes=classes, input_shape=input_shape)
    return model


def build(name: str) -> nn.Module:
    """A model of this file for ten classes of small colour images."""
    model: nn.Module = globals()[name](10, (3, 28, 28))
    return model
