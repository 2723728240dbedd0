"""Moving a batch norm into the convolution before it: which one that is, what the norm does to it, and whole models folded."""

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
    """The convolution whose output, and nothing else, each norm takes, found by tracing the model.

    Args:
        model: any model that torch.fx can trace.
        norms: the norms asked for; each must be a batch norm with running statistics behind such a convolution.
        part: who asks, for messages.
    """
    try:
        found = foldable_norms(model)
    except Exception as error:
        raise ModelError(
            f"{part}: init='keep' must know which convolution stands before each norm, but {type(model).__name__} cannot be traced "
            f"({type(error).__name__}: {error}). Use init='xavier'."
        ) from error
    names = {module: path for path, module in model.named_modules()}
    for norm in norms:
        if norm not in found:
            raise ModelError(
                f"{part}: init='keep' cannot fold {names[norm]} ({type(norm).__name__}): only a batch norm with running statistics, "
                "directly behind one convolution, can be folded. Use init='xavier'."
            )
    return {norm: convolution for norm, convolution in found.items() if norm in norms}


def foldable_norms(model: nn.Module) -> dict[nn.Module, nn.modules.conv._ConvNd]:
    """Every batch norm that can be folded, with the convolution whose output it takes, and nothing else."""
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
    """Looks into no batch norm, ours neither."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _has_statistics(norm: nn.Module) -> bool:
    """Whether it is a batch norm that predicts by running statistics and does nothing else, such as an activation."""
    known = isinstance(norm, JSBatchNorm) or (isinstance(norm, BatchNorm) and type(norm).forward is BatchNorm.forward)
    return known and isinstance(norm, BatchNorm) and norm.running_var is not None


@dataclass(frozen=True)
class Folded:
    """A model for prediction: ``norms`` batch norms and ``standardised`` convolutions were folded, those in ``left`` were not."""

    model: nn.Module
    norms: int
    standardised: int
    left: tuple[str, ...]


def fold_for_prediction(model: nn.Module) -> Folded:
    """A copy with plain convolutions in the place of standardised ones and of those with a batch norm behind them.

    The copy computes the same but for rounding, with less work, and is for prediction only. Norms that cannot be folded stay.
    """
    standardised = sum(map(is_standardised, model.modules()))
    made = fold(model).eval()
    try:
        before = foldable_norms(made)
    except Exception:  # whatever a model of somebody else does when it is traced: then its norms stay
        before = {}
    for norm, convolution in before.items():
        absorb(convolution, *scale_and_shift(convolution, norm))
    replace_modules(made, lambda module: module in before, lambda module: nn.Identity())
    left = tuple(path for path, module in made.named_modules() if isinstance(module, BatchNorm))
    return Folded(made, len(before), standardised, left)


@torch.no_grad()
def scale_and_shift(convolution: nn.modules.conv._ConvNd, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale and shift such that norm(conv(x, W) + b) = conv(x, scale * W) + shift, with the norm's running statistics."""
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
    """Scale a plain convolution's filters and set its bias, in place."""
    convolution.weight.mul_(scale.reshape(-1, *[1] * (convolution.weight.dim() - 1)))
    convolution.bias = nn.Parameter(shift)
