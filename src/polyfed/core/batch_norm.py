"""Batch norm: what counts as one, and its statistics estimated from batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

BatchNorm = nn.modules.batchnorm._BatchNorm
Average: TypeAlias = Literal["moving", "batches", "samples"]


def batch_norms_of(model: nn.Module) -> list[BatchNorm]:
    """Every batch norm of a model, in its order."""
    return [module for module in model.modules() if isinstance(module, BatchNorm)]


def layers_with_statistics(model: nn.Module) -> list[str]:
    """The paths of all batch norms that keep running statistics, in the order of the model."""
    return [path for path, module in model.named_modules() if isinstance(module, BatchNorm) and module.running_mean is not None]


@torch.no_grad()
def estimate_statistics(
    model: nn.Module, batches: Iterable[Tensor], average: Average, forward: Callable[[Tensor], object] | None = None
) -> None:
    """Let the statistics of batch norm follow some batches; everything else predicts. The model is left in evaluation mode.

    Args:
        model: whose statistics are changed in place.
        batches: prepared inputs on the model's device.
        average: moving: go on from the present statistics, with each layer's own momentum; batches: forget them, and take the mean over
            batches; samples: the same, each batch weighted by its size.
        forward: runs one batch through the model; None: the model itself.
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
