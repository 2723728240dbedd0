"""Standard networks as torchvision builds them, with a linear head for the classes at hand."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import torch
from torch import Tensor, nn

from polyfed.errors import ModelError
from polyfed.models import models


def resnet18(classes: int, input_shape: tuple[int, int, int], pretrained: bool = False) -> nn.Module:
    """The ResNet-18 of torchvision.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        pretrained: Start from ImageNet weights, with a new head.
    """
    from torchvision.models import ResNet18_Weights as Weights
    from torchvision.models import resnet18 as build

    return _made("resnet18", build, Weights.IMAGENET1K_V1.url if pretrained else None, "fc.", classes, input_shape)


def resnet50(classes: int, input_shape: tuple[int, int, int], pretrained: bool = False) -> nn.Module:
    """The ResNet-50 of torchvision.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        pretrained: Start from ImageNet weights (version 1, those of the papers), with a new head.
    """
    from torchvision.models import ResNet50_Weights as Weights
    from torchvision.models import resnet50 as build

    return _made("resnet50", build, Weights.IMAGENET1K_V1.url if pretrained else None, "fc.", classes, input_shape)


def mobilenet_v2(classes: int, input_shape: tuple[int, int, int], pretrained: bool = False) -> nn.Module:
    """The MobileNetV2 of torchvision.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        pretrained: Start from ImageNet weights (version 1), with a new head.
    """
    from torchvision.models import MobileNet_V2_Weights as Weights
    from torchvision.models import mobilenet_v2 as build

    return _made("mobilenet_v2", build, Weights.IMAGENET1K_V1.url if pretrained else None, "classifier.1.", classes, input_shape)


def densenet121(classes: int, input_shape: tuple[int, int, int], pretrained: bool = False) -> nn.Module:
    """The DenseNet-121 of torchvision.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        pretrained: Start from ImageNet weights, with a new head.
    """
    from torchvision.models import DenseNet121_Weights as Weights
    from torchvision.models import densenet121 as build

    return _made("densenet121", build, Weights.IMAGENET1K_V1.url if pretrained else None, "classifier.", classes, input_shape)


for _builder in (resnet18, resnet50, mobilenet_v2, densenet121):
    models.add(_builder)


def _made(
    name: str, build: Callable[..., nn.Module], url: str | None, head: str, classes: int, input_shape: tuple[int, int, int]
) -> nn.Module:
    """Build a network; with an address, load everything but the head from the weights found there."""
    if input_shape[0] != 3:
        raise ModelError(
            f"{name} takes images with 3 channels, found {input_shape[0]}. Repeat the grey channel three times, or use timm."
        )
    model = build(num_classes=classes)
    if url is not None:
        weights = {key: value for key, value in _fetched(name, url).items() if not key.startswith(head)}
        expected = {key for key in model.state_dict() if not key.startswith(head) and not key.endswith("num_batches_tracked")}
        if not expected <= set(weights):
            missing = sorted(expected - set(weights))
            raise ModelError(f"{name}: the weights of {url} lack {len(missing)} entries of the network, the first is {missing[0]}.")
        model.load_state_dict(weights, strict=False)
    return model


def _fetched(name: str, url: str) -> dict[str, Tensor]:
    """Weights from torch's cache, downloaded into it if need be."""
    place = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
    try:
        loaded: dict[str, Tensor] = torch.hub.load_state_dict_from_url(url, progress=False, check_hash=True, weights_only=True)
    except (OSError, HTTPException) as error:
        raise ModelError(
            f"{name}: the pretrained weights could not be fetched from {url} ({error}). "
            f"Connect to the network, or put that file at {place}, or use pretrained=False."
        ) from error
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ModelError(
            f"{name}: the pretrained weights at {place} are damaged or not those of {url}. Remove the file and try again."
        ) from error
    # The published DenseNet files name the parts of a dense layer norm.1, conv.1, ...; today's networks name them norm1, conv1, ...
    return {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(\d)", r"\1\2", key): value for key, value in loaded.items()}
