"""Networks for segmentation: a small U-Net, and DeepLabV3+ from segmentation-models-pytorch; no weights are fetched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.errors import MissingExtra, ModelError, nearest
from polyfed.models import models


def padded_to(x: Tensor, multiple: int) -> Tensor:
    """Images with zeros at the right and below, so that both sides are multiples of a number."""
    below, right = (-side % multiple for side in x.shape[-2:])
    return functional.pad(x, (0, right, 0, below)) if below or right else x


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


ENCODERS = ("mobilenet_v2", "resnet18", "resnet34", "resnet50", "resnet101")
STRIDES = (8, 16)


class DeepLabV3Plus(nn.Module):
    """The network of segmentation-models-pytorch, for images of any size: they are padded to a multiple of 16, and the logits cut back."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def get_classifier(self) -> nn.Module:
        """The convolution that makes the logits; what comes after it only enlarges them."""
        head: Any = self.network.segmentation_head
        layer: nn.Module = head[0]
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (n, classes, height, width)."""
        height, width = x.shape[-2:]
        logits: Tensor = self.network(padded_to(x, 16))
        return logits[..., :height, :width]


def deeplabv3plus(
    classes: int, input_shape: tuple[int, int, int], encoder: str = "mobilenet_v2", stride: int = 16, dropout: float = 0.5
) -> nn.Module:
    """DeepLabV3+ (Chen et al. 2018) with random weights, as FixBN trains it on Cityscapes.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        encoder: mobilenet_v2, resnet18, resnet34, resnet50 or resnet101.
        stride: Output stride of the encoder, 8 or 16.
        dropout: Share of the pyramid's features that is dropped in training.
    """
    if encoder not in ENCODERS:
        raise ModelError(f"deeplabv3plus has no encoder {encoder!r}. {nearest(encoder, ENCODERS)}")
    if stride not in STRIDES or not 0 <= dropout < 1:
        raise ModelError(f"deeplabv3plus: stride is {stride} and dropout {dropout}; they take 8 or 16, and 0 or more below 1.")
    try:
        from segmentation_models_pytorch import DeepLabV3Plus as Network
    except ImportError as error:
        raise MissingExtra(
            "DeepLabV3+ needs segmentation-models-pytorch. Install it with: pip install 'polyfed[segmentation]'. "
            "The model small_unet needs nothing."
        ) from error
    network = Network(
        encoder_name=encoder,
        encoder_weights=None,
        encoder_output_stride=stride,
        decoder_aspp_dropout=dropout,
        in_channels=input_shape[0],
        classes=classes,
    )
    return DeepLabV3Plus(network)


models.add(deeplabv3plus)
