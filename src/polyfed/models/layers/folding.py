"""Fold batch norms into the preceding convolutions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from polyfed.core.entries import BatchNorm
from polyfed.errors import ModelError
from polyfed.models.layers.norms import JSBatchNorm, james_stein
from polyfed.models.layers.surgery import replace_modules
from polyfed.models.layers.ws_conv import fold, is_standardised


def convolution_before(model: nn.Module, norms: Sequence[nn.Module], part: str) -> dict[nn.Module, nn.modules.conv._ConvNd]:
    """Return the convolution before each norm, found by tracing the model.

    Args:
        model: A model that torch.fx can trace.
        norms: Batch norms with running statistics, each directly after one convolution.
        part: Name of the method part for error messages.
    """
    try:
        found = foldable_norms(model)
    except Exception as error:
        raise ModelError(
            f"{part}: init='keep' needs the convolution before each norm, but torch.fx cannot trace {type(model).__name__} "
            f"({type(error).__name__}: {error}). Use init='xavier'."
        ) from error
    names = {module: path for path, module in model.named_modules()}
    for norm in norms:
        if norm not in found:
            raise ModelError(
                f"{part}: init='keep' cannot fold {names[norm]} ({type(norm).__name__}). Only a batch norm with running statistics "
                "directly after one convolution can be folded. Use init='xavier'."
            )
    return {norm: convolution for norm, convolution in found.items() if norm in norms}


def foldable_norms(model: nn.Module) -> dict[nn.Module, nn.modules.conv._ConvNd]:
    """Return every batch norm that can be folded, with the preceding convolution."""
    modules = dict(model.named_modules())
    called = [node for node in _Tracer().trace(model).nodes if node.op == "call_module"]
    times = Counter(str(node.target) for node in called)
    found: dict[nn.Module, nn.modules.conv._ConvNd] = {}
    for node in called:
        norm, source = modules[str(node.target)], node.args[0] if node.args else None
        if not _has_statistics(norm) or not isinstance(source, fx.Node) or source.op != "call_module":
            continue
        convolution = modules[str(source.target)]
        once = len(source.users) == 1 and times[str(source.target)] == times[str(node.target)] == 1
        if isinstance(convolution, nn.Conv1d | nn.Conv2d | nn.Conv3d) and once:
            found[norm] = convolution
    return found


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _has_statistics(norm: nn.Module) -> bool:
    """Return True for a batch norm that uses running statistics in evaluation and has no activation."""
    known = isinstance(norm, JSBatchNorm) or (isinstance(norm, BatchNorm) and type(norm).forward is BatchNorm.forward)
    return known and isinstance(norm, BatchNorm) and norm.running_var is not None


@dataclass(frozen=True)
class Folded:
    """A folded model, the numbers of folded batch norms and standardised convolutions, and the paths of the remaining batch norms."""

    model: nn.Module
    norms: int
    standardised: int
    left: tuple[str, ...]


def fold_for_prediction(model: nn.Module) -> Folded:
    """Copy a model for prediction, with batch norms folded and standardised convolutions replaced by plain ones.

    The copy is faster and computes the same values up to rounding. Batch norms that cannot be folded remain.
    """
    standardised = sum(map(is_standardised, model.modules()))
    folded = fold(model).eval()
    try:
        foldable = foldable_norms(folded)
    except Exception:  # a custom model may fail in any way when it is traced; its norms remain
        foldable = {}
    for norm, convolution in foldable.items():
        absorb(convolution, *scale_and_shift(convolution, norm))
    replace_modules(folded, lambda module: module in foldable, lambda module: nn.Identity())
    left = tuple(path for path, module in folded.named_modules() if isinstance(module, BatchNorm))
    return Folded(folded, len(foldable), standardised, left)


@torch.no_grad()
def scale_and_shift(convolution: nn.modules.conv._ConvNd, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return scale and shift such that norm(conv(x, W) + b) = conv(x, scale * W) + shift, with the norm's running statistics."""
    assert isinstance(norm, BatchNorm)
    assert norm.running_mean is not None and norm.running_var is not None
    shrunk = isinstance(norm, JSBatchNorm) and norm.shrink_eval
    mean, variance = (james_stein(v) if shrunk else v for v in (norm.running_mean, norm.running_var))
    scale = (variance + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight
    bias = torch.zeros_like(scale) if convolution.bias is None else convolution.bias
    shift = scale * (bias - mean)
    return scale, shift + norm.bias if norm.affine else shift


@torch.no_grad()
def absorb(convolution: nn.modules.conv._ConvNd, scale: Tensor, shift: Tensor) -> None:
    convolution.weight.mul_(scale.reshape(-1, *[1] * (convolution.weight.dim() - 1)))
    convolution.bias = nn.Parameter(shift)
