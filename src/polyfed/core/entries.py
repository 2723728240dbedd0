"""State entries (parameters and buffers), with their entry kind; and the statistics of batch norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from polyfed.errors import ModelError, nearest

BatchNorm = nn.modules.batchnorm._BatchNorm
Average: TypeAlias = Literal["moving", "batches", "samples"]


def batch_norms_of(model: nn.Module) -> list[BatchNorm]:
    """Return all batch norms of a model, in order."""
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


def layers_with_statistics(model: nn.Module) -> list[str]:
    """Return the paths of all batch norms with running statistics, in order."""
    return [path for path, module in model.named_modules() if isinstance(module, BatchNorm) and module.running_mean is not None]


@torch.no_grad()
def estimate_statistics(
    model: nn.Module, batches: Iterable[Tensor], average: Average, forward: Callable[[Tensor], object] | None = None
) -> None:
    """Update the batch-norm statistics with the given batches. The model is in evaluation mode afterwards.

    Args:
        model: Model whose statistics are changed in place.
        batches: Preprocessed inputs on the model's device.
        average: "moving" continues from the current statistics with each layer's momentum. "batches" discards them and takes the
            mean over batches. "samples" does the same, with each batch weighted by its size.
        forward: Runs one batch through the model. None: the model itself.
    """
    layers = batch_norms_of(model)
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.train()
        if average != "moving":
            layer.reset_running_stats()
            layer.momentum = None
    seen = 0
    try:
        for x in batches:
            seen += len(x)
            if average == "samples":
                for layer in layers:
                    layer.momentum = len(x) / seen
            (forward or model)(x)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        model.eval()


WEIGHT, HEAD, AFFINE, STATISTIC, COUNTER, MIX, MOMENTUM = (
    "weight",
    "head",
    "norm_affine",
    "norm_stat",
    "norm_count",
    "mix",
    "momentum",
)
OPTIMIZER = "optimizer/"


@dataclass(frozen=True)
class Entry:
    """State entry: a parameter or buffer. ``of`` is the parameter that an optimizer buffer belongs to."""

    name: str
    kind: str
    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    of: str | None = None

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def layer_family(module: nn.Module) -> str:
    """Return the layer type of a module, from its class. A layer may declare its own."""
    declared: str | None = getattr(type(module), "layer_family", None)
    if declared is not None:
        return declared
    families: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (BatchNorm, "batch_norm"),
        (nn.modules.instancenorm._InstanceNorm, "instance_norm"),
        (nn.GroupNorm, "group_norm"),
        ((nn.LayerNorm, nn.RMSNorm), "layer_norm"),
        (nn.modules.conv._ConvNd, "convolution"),
        (nn.Linear, "linear"),
    )
    for types, family in families:
        if isinstance(module, types):
            return family
    return type(module).__name__.lower()


NORM_FAMILIES = frozenset({"batch_norm", "instance_norm", "group_norm", "layer_norm"})


def entries_of(model: nn.Module, head: str | None = None) -> dict[str, Entry]:
    """Return all entries of a model with their kinds, in the order of ``state_dict``."""
    found: dict[str, Entry] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        family = layer_family(module)
        for key, tensor in _own_state(module).items():
            name = f"{path}.{key}" if path else key
            found[name] = Entry(name, _kind(module, family, key), family, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
    state = model.state_dict()
    unlisted = [name for name, value in state.items() if name not in found or not isinstance(value, Tensor)]
    if unlisted:
        raise ModelError(
            f"{type(model).__name__} has state that is neither a parameter nor a buffer ({', '.join(unlisted[:3])}). "
            "Register it as a buffer, so that it can be sent."
        )
    if head is not None:
        found = {name: _as_head(entry, head) for name, entry in found.items()}
    return {name: found[name] for name in state}


def optimizer_entries(entries: Mapping[str, Entry], buffers: tuple[str, ...]) -> dict[str, Entry]:
    """Return the entries of the optimizer buffers of all trainable parameters."""
    made = {}
    for entry in entries.values():
        if entry.trainable:
            for buffer in buffers:
                name = f"{OPTIMIZER}{buffer}/{entry.name}"
                shape = () if buffer == "step" else entry.shape
                dtype = torch.float32 if buffer == "step" else entry.dtype
                made[name] = Entry(name, MOMENTUM, entry.layer, shape, dtype, False, of=entry.name)
    return made


def _own_state(module: nn.Module) -> dict[str, Tensor]:
    own: dict[str, Tensor] = {key: value for key, value in module._parameters.items() if value is not None}
    for key, value in module._buffers.items():
        if value is not None and key not in module._non_persistent_buffers_set:
            own[key] = value
    return own


def _kind(module: nn.Module, family: str, key: str) -> str:
    declared: Mapping[str, str] = getattr(module, "entry_kinds", {})
    if key in declared:
        return declared[key]
    if key == "num_batches_tracked":
        return COUNTER
    if key in ("running_mean", "running_var"):
        return STATISTIC
    return AFFINE if family in NORM_FAMILIES else WEIGHT


def _as_head(entry: Entry, head: str) -> Entry:
    inside = entry.name.startswith(f"{head}.")
    return replace(entry, kind=HEAD) if inside and entry.kind == WEIGHT else entry


def find_head(model: nn.Module, sample: Tensor, named: str | None = None) -> tuple[str | None, str]:
    """Return the path of the module that produces the logits, or None and the reason.

    The head is the module that the user specified, otherwise the model's ``get_classifier()``, otherwise the last module with parameters
    whose output is the model's output in one traced batch.
    """
    paths = {module: path for path, module in model.named_modules()}
    if named is not None:
        known = {path: module for module, path in paths.items()}
        if named not in known:
            raise ModelError(f"{type(model).__name__} has no module {named!r} to use as the head. {nearest(named, known)}")
        return named, ""
    own = getattr(model, "get_classifier", None)
    if callable(own):
        module = own()
        if isinstance(module, nn.Module) and paths.get(module) and any(True for _ in module.parameters()):
            return paths[module], ""
    return _traced_head(model, sample, paths)


def _traced_head(model: nn.Module, sample: Tensor, paths: Mapping[nn.Module, str]) -> tuple[str | None, str]:
    last: list[tuple[nn.Module, Any]] = []

    def note(module: nn.Module, _: Any, output: Any) -> None:
        last[:] = [(module, output)]

    hooks = [module.register_forward_hook(note) for module in paths if any(True for _ in module.parameters(recurse=False))]
    training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(sample)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if last and last[0][1] is output and paths[last[0][0]]:
        return paths[last[0][0]], ""
    return None, f"the output of {type(model).__name__} does not come from a single last layer; specify the head with --head"
