"""Module surgery: modules chosen by type, stage, name pattern or predicate, on any model, and replaced.

A stage is a part of a network by the name of its module, such as ``layer1`` of a ResNet or ``denseblock1`` of a DenseNet, wherever in the model
it sits. ``stem`` is what comes before the first stage of such a network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch
from torch import nn

from polyfed.core.entries import BatchNorm
from polyfed.errors import ModelError, OptionError


def replace_modules(model: nn.Module, wanted: Callable[[nn.Module], bool], make: Callable[[nn.Module], nn.Module]) -> int:
    """Replace modules in place, in the order of the model; returns how many. A module used in two places stays one module."""
    made: dict[nn.Module, nn.Module] = {}
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if path and wanted(child):
            if child not in made:
                made[child] = make(child)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made[child])
    return len(made)


def replace_batch_norms(model: nn.Module, make: Callable[[nn.Module], nn.Module], part: str) -> nn.Module:
    """Replace every batch norm; a model without any is an error, since nothing would change."""

    def with_what_it_held(norm: nn.Module) -> nn.Module:
        """Activations that timm fuses into batch norm must outlive it."""
        inside = list(norm.children())
        return nn.Sequential(make(norm), *inside) if inside else make(norm)

    if isinstance(model, BatchNorm):
        return with_what_it_held(model)
    if replace_modules(model, lambda module: isinstance(module, BatchNorm), with_what_it_held) == 0:
        raise ModelError(
            f"{part}: {type(model).__name__} has no batch norm to replace. Use a model with batch norm, or leave {part} out."
        )
    return model


MAPS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Batch norms of maps. Those of vectors have no positions, over which a sample could be normalised by itself."""


def replace_map_norms(model: nn.Module, make: Callable[[BatchNorm], nn.Module], part: str, advice: str) -> nn.Module:
    """Replace every plain batch norm of maps; batch norms of vectors stay, and a model without any of maps is an error."""

    def made(norm: nn.Module) -> nn.Module:
        return make(plain_batch_norm(norm, part))

    if isinstance(model, MAPS):
        return made(model)
    if replace_modules(model, lambda module: isinstance(module, MAPS), made) == 0:
        raise ModelError(f"{part}: {type(model).__name__} has no batch norm of maps to replace. {advice}")
    return model


def add_missing_biases(model: nn.Module) -> None:
    """Give every convolution and linear layer without a bias one of zeros, for models whose batch norm carried the shift."""
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.Linear) and module.bias is None:
            outputs = module.out_channels if isinstance(module, nn.modules.conv._ConvNd) else module.out_features
            module.bias = nn.Parameter(torch.zeros(outputs, dtype=module.weight.dtype, device=module.weight.device))


Predicate: TypeAlias = "Callable[[str, nn.Module], bool]"
Where: TypeAlias = "str | Sequence[str] | Predicate"

PRESETS: Mapping[str, tuple[str, ...]] = {
    "first_two": ("stem", "layer1", "layer2"),
    "first_dense": ("denseblock1", "transition1"),
}
"""Places with a name of their own: the first two blocks of a ResNet, the first dense block and transition of a DenseNet."""

_STAGE = re.compile(r"(layer|denseblock|transition)\d+")


def modules_at(model: nn.Module, where: Where, candidates: Mapping[str, nn.Module], part: str) -> list[nn.Module]:
    """Those of some modules that lie at a place, in the order of the model; a place that holds none is an error.

    Args:
        model: the whole model.
        where: "all", a preset, a stage, several stages or name patterns (``features.*.norm1``), or a predicate of path and module.
        candidates: the modules to choose from, by path.
        part: the method that asks, for messages.
    """
    if callable(where):
        chosen = {path for path, module in candidates.items() if where(path, module)}
        _require(bool(chosen), f"{part}: the predicate chooses no layer of {type(model).__name__}.", model, candidates)
    elif where == "all":
        chosen = set(candidates)
    else:
        chosen = set()
        for name in places_named(where, part):
            found = _paths_at(model, name, candidates)
            _require(bool(found), f"{part}: {type(model).__name__} has no layer to replace at {name!r}.", model, candidates)
            chosen |= found
    return [module for path, module in candidates.items() if path in chosen]


def places_named(where: str | Sequence[str], part: str) -> tuple[str, ...]:
    """The stages and patterns that a text or a list of texts stands for."""
    names = PRESETS.get(where, (where,)) if isinstance(where, str) else where
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) and name for name in names):
        raise OptionError(
            f'{part}: where takes all, {", ".join(PRESETS)}, a stage, or a list of stages such as ("stem", "layer1"), found {where!r}.'
        )
    return tuple(names)


def stages_of(model: nn.Module) -> list[str]:
    """The names of the stages of a ResNet or a DenseNet, in order, with ``stem`` first; empty for other models."""
    found = dict.fromkeys(name for path, _ in model.named_modules() if _STAGE.fullmatch(name := path.rpartition(".")[2]))
    return ["stem", *found] if found else []


def plain_batch_norm(norm: nn.Module, part: str) -> BatchNorm:
    """The module as a batch norm; one that holds further modules (a fused activation) is refused, since they would be lost."""
    if not isinstance(norm, BatchNorm) or any(True for _ in norm.children()):
        raise ModelError(
            f"{part}: {type(norm).__name__} is a batch norm with other layers inside ({', '.join(n for n, _ in norm.named_children())}), "
            "which would be lost. Use a model with plain batch norm, such as those of torchvision."
        )
    return norm


def _paths_at(model: nn.Module, name: str, candidates: Iterable[str]) -> set[str]:
    if any(sign in name for sign in "*?["):
        return {path for path in candidates if fnmatchcase(path, name)}
    roots = _roots(model, name)
    return {path for path in candidates if any(path == root or path.startswith(f"{root}.") for root in roots)}


def _roots(model: nn.Module, name: str) -> list[str]:
    """Paths of the modules a stage stands for: one of exactly that path, else those whose path ends with it, else the stem's."""
    paths = [path for path, _ in model.named_modules() if path]
    exact = [path for path in paths if path == name]
    ending = [path for path in paths if path.endswith(f".{name}")]
    if exact or ending or name != "stem":
        return exact or ending
    first = next((index for index, path in enumerate(paths) if _STAGE.fullmatch(path.rpartition(".")[2])), 0)
    around = paths[first].split(".")[:-1] if first else []
    containers = {".".join(around[: depth + 1]) for depth in range(len(around))}
    return [path for path in paths[:first] if path not in containers]


def _require(found: bool, problem: str, model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
    if not found:
        stages = stages_of(model)
        there = f"Its stages: {', '.join(stages)}." if stages else f"Its layers: {', '.join(list(candidates)[:8]) or 'none'}."
        raise ModelError(f'{problem} {there} Name other places, or use where="all".')
