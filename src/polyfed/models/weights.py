"""Weights from elsewhere: read without running anything that is in a file, put into a network, and what images they want.

A run that is opened again has weights of its own. Inside ``weights_left_out`` networks are built as for their weights, and none are read.
"""

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

_left_out: ContextVar[bool] = ContextVar("weights left out", default=False)


@dataclass(frozen=True)
class ImagesOfWeights:
    """The images that weights were trained on: their side, and the mean and spread by which their channels were normalised."""

    side: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and spread for images of these channels; where there are not three, each channel gets the means of the three values."""
        if channels == len(self.mean):
            return self.mean, self.std
        return ((sum(self.mean) / len(self.mean),) * channels, (sum(self.std) / len(self.std),) * channels)


@contextmanager
def weights_left_out() -> Iterator[None]:
    """Read no weights inside the block: those of a run take their place."""
    token = _left_out.set(True)
    try:
        yield
    finally:
        _left_out.reset(token)


def are_read() -> bool:
    """Whether weights that a text asks for are read."""
    return not _left_out.get()


def read_weights(file: str, asked_by: str) -> dict[str, Tensor]:
    """The tensors of a file, ``.safetensors`` or written by ``torch.save``; nothing in it is run.

    Args:
        file: the file.
        asked_by: what wants the weights, for messages.
    """
    path = Path(file).expanduser()
    if not os.path.isfile(path):
        raise ModelError(
            f"{asked_by}: there is no file {file}. Give the weights as a .safetensors file or a .pth file of torch.save."
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of pickles that it then refuses
            found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True, map_location="cpu")
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"{asked_by}: {file} cannot be read as weights ({type(error).__name__}). Files may hold tensors by their names and nothing "
            "else: .safetensors, or a state_dict written by torch.save."
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ModelError(f"{asked_by}: {file} does not hold a state_dict: tensors by their names.")
    return dict(found)


def put_into(model: nn.Module, weights: Mapping[str, Tensor], head: Collection[str], name: str, source: str) -> None:
    """Load weights into a network, all but its head; what is missing or has another shape is an error.

    Args:
        model: the network.
        weights: tensors by the network's names; counters of batch norms may be missing, and what the network has not is left.
        head: names of the head's entries, which stay as they are.
        name: the network's name.
        source: where the weights come from.
    """
    own = {key: value for key, value in model.state_dict().items() if key not in head}
    missing = sorted(key for key in own if key not in weights and not key.endswith(COUNTER))
    if missing:
        raise ModelError(f"{name}: the weights of {source} lack {len(missing)} entries of the network, the first is {missing[0]}.")
    other = [key for key in own if key in weights and own[key].shape != weights[key].shape]
    if other:
        raise ModelError(
            f"{name}: {other[0]} of {source} has the shape {tuple(weights[other[0]].shape)}, the network's is {tuple(own[other[0]].shape)}."
        )
    model.load_state_dict({**model.state_dict(), **{key: weights[key] for key in own if key in weights}})


def head_of(build: Callable[[int], nn.Module], classes: int) -> set[str]:
    """The entries of a network whose shape goes with the number of classes."""
    with torch.device("meta"):
        one, other = build(classes).state_dict(), build(classes + 1).state_dict()
    return {key for key in one if one[key].shape != other[key].shape}


def see_grey(model: nn.Module) -> None:
    """Let a network for three channels take one, as if the grey image were in all three: its first convolution is summed over them."""
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


def require_grey_or_colour(name: str, channels: int) -> None:
    """Refuse images that are neither grey nor in colour."""
    if channels not in (1, RGB):
        raise ModelError(
            f"{name} takes images with 1 or 3 channels, found {channels}. Use a network of timm (timm:NAME), or one of your own."
        )
