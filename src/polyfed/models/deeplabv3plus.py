"""DeepLabV3+ for segmentation, from segmentation-models-pytorch; no weights are fetched."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polyfed.errors import MissingExtra, ModelError, nearest
from polyfed.models import models
from polyfed.models.blocks import padded_to

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
