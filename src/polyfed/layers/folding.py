"""Moving a batch norm into the convolution before it: which one that is, and what the norm does to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from polyfed.core.batch_norm import BatchNorm
from polyfed.errors import ModelError


def convolution_before(model: nn.Module, norms: Sequence[nn.Module], part: str) -> dict[nn.Module, nn.modules.conv._ConvNd]:
    """The convolution whose output, and nothing else, each norm takes, found by tracing the model.

    Args:
        model: any model that torch.fx can trace.
        norms: the norms asked for; each must be a batch norm with running statistics behind such a convolution.
        part: who asks, for messages.
    """
    modules = dict(model.named_modules())
    names = {module: path for path, module in modules.items()}
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:
        raise ModelError(
            f"{part}: init='keep' must know which convolution stands before each norm, but {type(model).__name__} cannot be traced "
            f"({type(error).__name__}: {error}). Use init='xavier'."
        ) from error
    called = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(str(node.target) for node in called)
    found: dict[nn.Module, nn.modules.conv._ConvNd] = {}
    for node in called:
        source = node.args[0] if node.args else None
        if modules[str(node.target)] not in norms or not isinstance(source, fx.Node) or source.op != "call_module":
            continue
        convolution = modules[str(source.target)]
        once = len(source.users) == 1 and times[str(source.target)] == times[str(node.target)] == 1
        if isinstance(convolution, nn.Conv1d | nn.Conv2d | nn.Conv3d) and once:
            found[modules[str(node.target)]] = convolution
    for norm in norms:
        if norm not in found or not isinstance(norm, BatchNorm) or norm.running_var is None:
            raise ModelError(
                f"{part}: init='keep' cannot fold {names[norm]} ({type(norm).__name__}): only a batch norm with running statistics, "
                "directly behind one convolution, can be folded. Use init='xavier'."
            )
    return found


@torch.no_grad()
def scale_and_shift(convolution: nn.modules.conv._ConvNd, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale and shift such that norm(conv(x, W) + b) = conv(x, scale * W) + shift, with the norm's running statistics."""
    assert isinstance(norm, BatchNorm)
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight
    bias = torch.zeros_like(scale) if convolution.bias is None else convolution.bias
    shift = scale * (bias - norm.running_mean)
    return scale, shift + norm.bias if norm.affine else shift


@torch.no_grad()
def absorb(convolution: nn.modules.conv._ConvNd, scale: Tensor, shift: Tensor) -> None:
    """Scale a plain convolution's filters and set its bias, in place."""
    convolution.weight.mul_(scale.reshape(-1, *[1] * (convolution.weight.dim() - 1)))
    convolution.bias = nn.Parameter(shift)
