"""Pretrained weights: read them without running code, load them into a network, and adapt its input channels."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from polyfed.errors import ModelError

COUNTER = "num_batches_tracked"
RGB = 3

_skipped: ContextVar[bool] = ContextVar("weights skipped", default=False)


@dataclass(frozen=True)
class ImagesOfWeights:
    """Side and per-channel normalisation of the images that weights were trained on."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation per channel; the averages over RGB if there are not three channels."""
        if channels == len(self.mean):
            return self.mean, self.std
        return ((sum(self.mean) / len(self.mean),) * channels, (sum(self.std) / len(self.std),) * channels)


@contextmanager
def weights_skipped() -> Iterator[None]:
    """Build networks without reading their pretrained weights inside the block, because a run replaces them by its weights."""
    token = _skipped.set(True)
    try:
        yield
    finally:
        _skipped.reset(token)


def loads_weights() -> bool:
    return not _skipped.get()


def read_weights(file: str, model: str) -> dict[str, Tensor]:
    """Read tensors from a ``.safetensors`` file or a file written by ``torch.save``, without running code in it.

    Args:
        file: Path of the file.
        model: Name of the model for error messages.
    """
    path = Path(file).expanduser()
    if not os.path.isfile(path):
        raise ModelError(f"{model}: file {file} not found. Specify a .safetensors file or a .pth file written by torch.save.")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about pickles that it then rejects
            found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True, map_location="cpu")
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"{model}: cannot read weights from {file} ({type(error).__name__}). The file must contain only named tensors: "
            ".safetensors, or a state_dict written by torch.save."
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"{model}: {file} does not contain a state_dict (named tensors).")
    return dict(found)


def load_entries(model: nn.Module, weights: Mapping[str, Tensor], head: Collection[str], name: str, source: str) -> None:
    """Load weights into a network, except its head.

    Args:
        model: The network.
        weights: Tensors by entry name. Batch norm counters may be missing; entries that the network lacks are ignored.
        head: Entry names of the head, which is unchanged.
        name: Name of the network for error messages.
        source: Origin of the weights for error messages.

    Raises:
        ModelError: If an entry is missing or has a different shape.
    """
    own = {key: value for key, value in model.state_dict().items() if key not in head}
    missing = sorted(key for key in own if key not in weights and not key.endswith(COUNTER))
    if missing:
        raise ModelError(f"{name}: the weights in {source} lack {len(missing)} entries of the network, the first is {missing[0]}.")
    other = [key for key in own if key in weights and own[key].shape != weights[key].shape]
    if other:
        raise ModelError(
            f"{name}: {other[0]} in {source} has shape {tuple(weights[other[0]].shape)}, but the network needs {tuple(own[other[0]].shape)}."
        )
    model.load_state_dict({**model.state_dict(), **{key: weights[key] for key in own if key in weights}})


def head_entries(build: Callable[[int], nn.Module], classes: int) -> set[str]:
    """Return the entries whose shape depends on the number of classes."""
    with torch.device("meta"):
        one, other = build(classes).state_dict(), build(classes + 1).state_dict()
    return {key for key in one if one[key].shape != other[key].shape}


def convert_to_grey(model: nn.Module) -> None:
    """Sum the first convolution over its three input channels, so that a grey image has the same effect as three equal channels."""
    path, first = next((path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    grey = nn.Conv2d(
        1,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        first.dilation,  # type: ignore[arg-type]
        bias=first.bias is not None,
        padding_mode=first.padding_mode,
    )
    with torch.no_grad():
        grey.weight.copy_(first.weight.sum(dim=1, keepdim=True))
        if first.bias is not None and grey.bias is not None:
            grey.bias.copy_(first.bias)
    model.set_submodule(path, grey)


def require_grey_or_rgb(name: str, channels: int) -> None:
    if channels not in (1, RGB):
        raise ModelError(
            f"{name} needs images with 1 or 3 channels, got {channels}. Use a timm network (timm:NAME) or a custom model."
        )
