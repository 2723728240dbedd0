"""Module surgery by type: replace every module of a kind, whatever it is called."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from polyfed.core.batch_norm import BatchNorm
from polyfed.errors import ModelError


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


def add_missing_biases(model: nn.Module) -> None:
    """Give every convolution and linear layer without a bias one of zeros, for models whose batch norm carried the shift."""
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.Linear) and module.bias is None:
            outputs = module.out_channels if isinstance(module, nn.modules.conv._ConvNd) else module.out_features
            module.bias = nn.Parameter(torch.zeros(outputs, dtype=module.weight.dtype, device=module.weight.device))
