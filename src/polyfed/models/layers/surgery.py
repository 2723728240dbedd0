"""Select modules of any model by type, stage, name pattern or predicate, and replace them.

A stage is a module named like a part of a network, such as ``layer1`` of a ResNet or ``denseblock1`` of a DenseNet, at any depth of the
model. ``stem`` is everything before the first stage.
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
    """Replace modules in place, in model order, and return their number. A shared module is replaced by one shared module."""
    made: dict[nn.Module, nn.Module] = {}
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if path and wanted(child):
            if child not in made:
                made[child] = make(child)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, made[child])
    return len(made)


def replace_batch_norms(model: nn.Module, make: Callable[[nn.Module], nn.Module], part: str) -> nn.Module:
    """Replace every batch norm.

    Raises:
        ModelError: If the model has no batch norm.
    """

    def replace(norm: nn.Module) -> nn.Module:
        activations = list(norm.children())  # timm's batch norms contain their activation
        return nn.Sequential(make(norm), *activations) if activations else make(norm)

    if isinstance(model, BatchNorm):
        return replace(model)
    if replace_modules(model, lambda module: isinstance(module, BatchNorm), replace) == 0:
        raise ModelError(f"{part}: {type(model).__name__} has no batch norm. Use a model with batch norm, or remove {part}.")
    return model


MAPS = (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Batch norms of feature maps. ``BatchNorm1d`` of vectors has no positions over which a sample could be normalised alone."""


def replace_map_norms(model: nn.Module, make: Callable[[BatchNorm], nn.Module], part: str, advice: str) -> nn.Module:
    """Replace every plain batch norm of feature maps.

    Raises:
        ModelError: If the model has none.
    """

    def replace(norm: nn.Module) -> nn.Module:
        return make(plain_batch_norm(norm, part))

    if isinstance(model, MAPS):
        return replace(model)
    if replace_modules(model, lambda module: isinstance(module, MAPS), replace) == 0:
        raise ModelError(f"{part}: {type(model).__name__} has no batch norm of feature maps. {advice}")
    return model


def add_missing_biases(model: nn.Module) -> None:
    """Add zero biases to convolutions and linear layers without bias, for models whose batch norm contained the shift."""
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
"""Named places: the first two blocks of a ResNet, and the first dense block and transition of a DenseNet."""

_STAGE = re.compile(r"(layer|denseblock|transition)\d+")


def modules_at(model: nn.Module, where: Where, candidates: Mapping[str, nn.Module], part: str) -> list[nn.Module]:
    """Return the candidates at a place, in model order.

    Args:
        model: The whole model.
        where: "all", a preset, a stage, several stages or name patterns (``features.*.norm1``), or a predicate of path and module.
        candidates: Modules to choose from, by path.
        part: Name of the method part for error messages.

    Raises:
        ModelError: If there is no candidate at a place.
    """
    if callable(where):
        chosen = {path for path, module in candidates.items() if where(path, module)}
        _require(bool(chosen), f"{part}: the predicate selects no layer of {type(model).__name__}.", model, candidates)
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
    """Return the stages and patterns of ``where``."""
    names = PRESETS.get(where, (where,)) if isinstance(where, str) else where
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) and name for name in names):
        raise OptionError(
            f'{part}: where must be all, {", ".join(PRESETS)}, a stage, or a list of stages such as ("stem", "layer1"), got {where!r}.'
        )
    return tuple(names)


def stages_of(model: nn.Module) -> list[str]:
    """Return the stage names of a ResNet or DenseNet, in order, with ``stem`` first; empty for other models."""
    found = dict.fromkeys(name for path, _ in model.named_modules() if _STAGE.fullmatch(name := path.rpartition(".")[2]))
    return ["stem", *found] if found else []


def plain_batch_norm(norm: nn.Module, part: str) -> BatchNorm:
    """Return the module as a batch norm.

    Raises:
        ModelError: If it contains other modules, such as a fused activation, which a replacement would lose.
    """
    if not isinstance(norm, BatchNorm) or any(True for _ in norm.children()):
        raise ModelError(
            f"{part}: cannot replace {type(norm).__name__}, a batch norm that contains other layers "
            f"({', '.join(n for n, _ in norm.named_children())}). Use a model with plain batch norm, such as torchvision's."
        )
    return norm


def _paths_at(model: nn.Module, name: str, candidates: Iterable[str]) -> set[str]:
    if any(sign in name for sign in "*?["):
        return {path for path in candidates if fnmatchcase(path, name)}
    roots = _roots(model, name)
    return {path for path in candidates if any(path == root or path.startswith(f"{root}.") for root in roots)}


def _roots(model: nn.Module, name: str) -> list[str]:
    """Return the paths of a stage: the module with exactly this path, or those whose path ends with it, or those of the stem."""
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
        raise ModelError(f'{problem} {there} Choose other places, or use where="all".')
