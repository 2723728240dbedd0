"""Normalisation layers: instance norm, batch norm with James-Stein estimates, and XAN.

James-Stein estimates of the channel means and variances (``JSBatchNorm``):

    JS(v) = (1 - (c - 2) * s2(v) / ||v||^2) * v,   v: the c channel means, or the c channel variances; s2: their variance across channels (1/c)
    y = gamma * (x - JS(mu)) / sqrt(JS(sigma2) + eps) + beta

Since s2(v) <= ||v||^2 / c, the factor is between 2/c and 1, so shrunk variances are positive. It is 1 for c <= 2 and for v = 0.
The buffers contain raw statistics, so that repeated averaging does not shrink them further.

Instance norm and batch norm in parallel, each with an affine transformation, mixed by two learned scores (``XAN``):

    y = w_in * IN(x) + w_bn * BN(x),   (w_in, w_bn) = softmax(score_in, score_bn)
"""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.entries import MIX, BatchNorm
from polyfed.errors import ModelError
from polyfed.models.layers.surgery import MAPS, Where, modules_at, plain_batch_norm, replace_modules


def groups_for(channels: int, wanted: int) -> int:
    """Return the number of groups for a number of channels.

    This is ``wanted`` if it divides the channels. Otherwise it is 8 if ``wanted`` exceeds the channels and 8 divides them (FedWon A.2),
    or else the largest divisor below ``wanted`` (24 for 144 channels).

    >>> [groups_for(channels, 32) for channels in (64, 16, 144, 30)]
    [32, 8, 24, 30]
    """
    if channels % wanted == 0:
        return wanted
    if channels < wanted and channels % 8 == 0:
        return 8
    return max(divisor for divisor in range(1, min(wanted, channels) + 1) if channels % divisor == 0)


class InstanceNorm(nn.Module):
    """Instance norm with affine parameters, for any number of spatial dimensions: group norm with one group per channel."""

    layer_family: ClassVar[str] = "instance_norm"

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        if math.prod(x.shape[2:]) == 1:
            raise ModelError(
                f"instance_norm is undefined for feature maps with one position per channel (shape {tuple(x.shape[1:])}). "
                "Use larger inputs, group_norm or layer_norm."
            )
        return F.group_norm(x, self.channels, self.weight, self.bias, self.eps)


@torch.no_grad()
def track(norm: BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics with the momentum of a batch norm, or with the mean over batches if it has no momentum.

    Args:
        norm: Layer to update. A layer without running statistics is unchanged.
        mean: Batch mean per channel.
        variance: Unbiased batch variance per channel.
    """
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked.add_(1)
    momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
    norm.running_var.mul_(1 - momentum).add_(variance, alpha=momentum)


def james_stein_factor(values: Tensor) -> Tensor:
    """Return the factor by which the James-Stein estimator shrinks a vector towards zero."""
    count = values.numel()
    if count <= 2:
        return torch.ones((), dtype=values.dtype, device=values.device)
    length = values.square().sum()
    safe_length = torch.where(length > 0, length, torch.ones_like(length))
    factor = 1 - (count - 2) * values.var(correction=0) / safe_length
    # Exact arithmetic needs no clamp; this corrects rounding errors.
    return factor.clamp(2 / count, 1)


def james_stein(values: Tensor) -> Tensor:
    return james_stein_factor(values) * values


class JSBatchNorm(BatchNorm):
    """Batch norm with James-Stein estimates, for inputs (N, C) and (N, C, ...).

    ``shrink_train`` shrinks the batch statistics; gradients flow through the shrinkage, and the buffers are updated with the raw values.
    ``shrink_eval`` shrinks the running statistics in evaluation. If both are False, this is plain batch norm.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        shrink_train: bool = True,
        shrink_eval: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.shrink_train, self.shrink_eval = shrink_train, shrink_eval

    @classmethod
    def like(cls, norm: BatchNorm, shrink_train: bool = True, shrink_eval: bool = True) -> JSBatchNorm:
        layer = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, shrink_train, shrink_eval)
        for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
            own = layer.get_parameter(name) if isinstance(tensor, nn.Parameter) else layer.get_buffer(name)
            own.data = tensor.detach().clone()
            own.requires_grad_(tensor.requires_grad)
        return layer.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(f"JSBatchNorm: inputs must have shape (N, C) or (N, C, ...), got {tuple(input.shape)}.")

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        by_batch = self.training or self.running_mean is None or self.running_var is None
        if not (self.shrink_train if by_batch else self.shrink_eval):
            return super().forward(x)
        if by_batch:
            return self._normalise_by_batch(x)
        assert self.running_mean is not None and self.running_var is not None
        mean, variance = james_stein(self.running_mean), james_stein(self.running_var)
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)

    def _normalise_by_batch(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[1]
        if count < 2:
            raise ModelError(
                f"Batch norm needs at least two values per channel in training, got an input of shape {tuple(x.shape)}."
            )
        axes = (0, *range(2, x.dim()))
        shape = (1, -1, *([1] * (x.dim() - 2)))
        mean = x.mean(axes)
        variance = (x - mean.view(shape)).square().mean(axes)
        if self.training:
            track(self, mean.detach(), variance.detach() * (count / (count - 1)))
        scale = torch.rsqrt(james_stein(variance) + self.eps)
        scale = scale if self.weight is None else scale * self.weight
        shift = -james_stein(mean) * scale
        shift = shift if self.bias is None else shift + self.bias
        return x * scale.view(shape) + shift.view(shape)

    def extra_repr(self) -> str:
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, shrink_train={self.shrink_train}, shrink_eval={self.shrink_eval}"


class XAN(nn.Module):
    """A batch norm and an instance norm in parallel.

    The given batch norm is used unchanged, with its pretrained entries. ``in_init`` sets the initial affine parameters of the instance norm:
    ``copy_bn`` or ``ones``. Instance norm is undefined for feature maps with one position: ``tiny_maps="error"`` raises an error for
    them, ``"skip"`` uses only the batch norm.
    """

    entry_kinds: ClassVar[dict[str, str]] = {"score_in": MIX, "score_bn": MIX}

    def __init__(
        self,
        norm: BatchNorm,
        in_init: str = "copy_bn",
        instance_score: float = 1.0,
        tiny_maps: str = "error",
    ) -> None:
        super().__init__()
        self.tiny_maps = tiny_maps
        self.batch_side = norm
        anchor = next(itertools.chain(norm.parameters(), norm.buffers()), torch.empty(0))
        self.instance_side = InstanceNorm(norm.num_features, norm.eps).to(anchor)
        if in_init == "copy_bn" and norm.affine:
            self.instance_side.load_state_dict({"weight": norm.weight, "bias": norm.bias})
        self.score_in = nn.Parameter(anchor.new_tensor(float(instance_score)))
        self.score_bn = nn.Parameter(anchor.new_tensor(1.0))
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        batch: Tensor = self.batch_side(x)
        if math.prod(x.shape[2:]) == 1:
            if self.tiny_maps == "skip":
                return batch
            raise ModelError(
                f"XAN: instance norm is undefined for feature maps with one position per channel (shape {tuple(x.shape[1:])}). "
                'Use larger inputs, other places (where=...), or tiny_maps="skip".'
            )
        instance_share, batch_share = torch.stack((self.score_in, self.score_bn)).softmax(dim=0).unbind()
        instance: Tensor = self.instance_side(x)
        return instance_share * instance + batch_share * batch


def put_xan(
    model: nn.Module,
    where: Where = "all",
    in_init: str = "copy_bn",
    instance_score: float = 1.0,
    tiny_maps: str = "error",
    part: str = "xan",
) -> nn.Module:
    """Replace the batch norms of feature maps at the selected places by XAN, in place. ``BatchNorm1d`` has no positions and is unchanged."""
    candidates = {path: module for path, module in model.named_modules() if isinstance(module, MAPS)}
    if not candidates:
        raise ModelError(
            f"{part}: {type(model).__name__} has no batch norm of feature maps. Use a model with batch norm, or remove {part}."
        )
    chosen = set(modules_at(model, where, candidates, part))

    def make(norm: nn.Module) -> nn.Module:
        return XAN(plain_batch_norm(norm, part), in_init, instance_score, tiny_maps)

    if model in chosen:
        return make(model)
    replace_modules(model, chosen.__contains__, make)
    return model
