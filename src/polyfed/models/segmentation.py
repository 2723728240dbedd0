"""Networks for segmentation with random weights: a small U-Net, and DeepLabV3+ from segmentation-models-pytorch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyfed.errors import MissingExtra, ModelError, nearest
from polyfed.models import models


def padded_to(x: Tensor, multiple: int) -> Tensor:
    """Pad images with zeros at the right and bottom to multiples of a number."""
    below, right = (-side % multiple for side in x.shape[-2:])
    return functional.pad(x, (0, right, 0, below)) if below or right else x


STRIDE = 8


class SmallUNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) with three levels, skip connections and a 1x1 head.

    Images of any size are padded to a multiple of 8, and the logits are cropped.
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
        height, width = x.shape[-2:]
        sizes = [self.enter(padded_to(x, STRIDE))]
        for shrink in self.down:
            sizes.append(shrink(sizes[-1]))
        features = sizes.pop()
        for grow in self.up:
            features = grow(torch.cat([self.enlarge(features), sizes.pop()], dim=1))
        logits: Tensor = self.head(features[..., :height, :width])
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
        width: Channels at full resolution; deeper levels have up to four times as many.
    """
    if width < 1:
        raise ModelError(f"small_unet: width must be at least 1, got {width}.")
    return SmallUNet(classes, input_shape[0], width)


models.add(small_unet)


ENCODERS = ("mobilenet_v2", "resnet18", "resnet34", "resnet50", "resnet101")
STRIDES = (8, 16)


class DeepLabV3Plus(nn.Module):
    """DeepLabV3+ for images of any size: they are padded to a multiple of 16, and the logits are cropped."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def get_classifier(self) -> nn.Module:
        """Return the convolution that computes the logits; the layers after it only resize them."""
        head: Any = self.network.segmentation_head
        layer: nn.Module = head[0]
        return layer

    def forward(self, x: Tensor) -> Tensor:
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
        dropout: Dropout probability in the spatial pyramid.
    """
    if encoder not in ENCODERS:
        raise ModelError(f"deeplabv3plus has no encoder {encoder!r}. {nearest(encoder, ENCODERS)}")
    if stride not in STRIDES or not 0 <= dropout < 1:
        raise ModelError(f"deeplabv3plus: stride must be 8 or 16 and dropout in [0, 1), got stride={stride}, dropout={dropout}.")
    try:
        from segmentation_models_pytorch import DeepLabV3Plus as Network
    except ImportError as error:
        raise MissingExtra(
            "DeepLabV3+ needs segmentation-models-pytorch. Install it with: pip install 'polyfed[segmentation]', or use small_unet."
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
