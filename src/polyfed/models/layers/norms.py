"""Normalisation layers: instance norm, batch norm with James-Stein estimates, and XAN.

James-Stein estimates of the channels' means and variances (``JSBatchNorm``):

    JS(v) = (1 - (c - 2) * s2(v) / ||v||^2) * v,   v: the c channel means, or the c channel variances; s2: their variance across channels (1/c)
    y = gamma * (x - JS(mu)) / sqrt(JS(sigma2) + eps) + beta

Since s2(v) <= ||v||^2 / c, the factor lies in [2/c, 1]: shrunk variances stay positive. It is 1 for c <= 2 and for v = 0.
Buffers hold raw statistics, so averaging and shrinking never compounds.

Instance norm and batch norm in parallel, each with its affine, mixed by two learnt scores (``XAN``):

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
    """The number of groups for a number of channels.

    The wanted number where it divides the channels; else 8 where there are fewer channels than groups and 8 divides them
    (FedWon A.2); else the largest divisor below the wanted number (24 for 144 channels).

    >>> [groups_for(channels, 32) for channels in (64, 16, 144, 30)]
    [32, 8, 24, 30]
    """
    if channels % wanted == 0:
        return wanted
    if channels < wanted and channels % 8 == 0:
        return 8
    return max(divisor for divisor in range(1, min(wanted, channels) + 1) if channels % divisor == 0)


class InstanceNorm(nn.Module):
    """Instance norm with a per-channel affine for any number of spatial dimensions.

    It is group norm with a group per channel: (x - mean) / sqrt(var + eps) over the positions of one sample and channel.
    """

    layer_family: ClassVar[str] = "instance_norm"

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; maps of a single position have no spread and are refused."""
        if math.prod(x.shape[2:]) == 1:
            raise ModelError(
                f"instance_norm: the map has one position per channel (shape {tuple(x.shape[1:])}), so instance norm is undefined there. "
                "Use larger inputs, group_norm or layer_norm."
            )
        return F.group_norm(x, self.channels, self.weight, self.bias, self.eps)


@torch.no_grad()
def track(norm: BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics as batch norm does: by its momentum, or by the plain mean over batches where it has none.

    Args:
        norm: the layer whose buffers are updated; nothing happens where it tracks no statistics.
        mean: the batch's mean of each channel.
        variance: the batch's unbiased variance of each channel.
    """
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.mul_(1 - share).add_(mean, alpha=share)
    norm.running_var.mul_(1 - share).add_(variance, alpha=share)


def james_stein_factor(values: Tensor) -> Tensor:
    """The factor by which the James-Stein estimator shrinks a vector towards zero."""
    count = values.numel()
    if count <= 2:
        return torch.ones((), dtype=values.dtype, device=values.device)
    length = values.square().sum()
    safe_length = torch.where(length > 0, length, torch.ones_like(length))
    factor = 1 - (count - 2) * values.var(correction=0) / safe_length
    # The bounds hold exactly in exact arithmetic; this only guards against rounding.
    return factor.clamp(2 / count, 1)


def james_stein(values: Tensor) -> Tensor:
    """A vector shrunk towards zero."""
    return james_stein_factor(values) * values


class JSBatchNorm(BatchNorm):
    """Batch norm whose statistics are shrunk before they are used, for inputs (N, C) and (N, C, ...).

    ``shrink_train`` shrinks the batch's mean and variance; gradients flow through the shrinkage, and the buffers are updated with the raw ones.
    ``shrink_eval`` shrinks the running statistics when they are used. With both off it is plain batch norm.
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
        """A layer with the affine, statistics and settings of a batch norm."""
        made = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, shrink_train, shrink_eval)
        for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
            own = made.get_parameter(name) if isinstance(tensor, nn.Parameter) else made.get_buffer(name)
            own.data = tensor.detach().clone()
            own.requires_grad_(tensor.requires_grad)
        return made.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(f"JSBatchNorm takes inputs of shape (N, C) or (N, C, ...), found {tuple(input.shape)}.")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with shrunk statistics: of the batch in training, running ones in evaluation."""
        self._check_input_dim(x)
        of_batch = self.training or self.running_mean is None or self.running_var is None
        if not (self.shrink_train if of_batch else self.shrink_eval):
            return super().forward(x)
        if of_batch:
            return self._by_batch(x)
        assert self.running_mean is not None and self.running_var is not None
        mean, variance = james_stein(self.running_mean), james_stein(self.running_var)
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)

    def _by_batch(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[1]
        if count < 2:
            raise ModelError(f"Batch norm needs more than one value per channel in training, found an input of {tuple(x.shape)}.")
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
        """The settings of batch norm, and which statistics are shrunk."""
        settings = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, shrink_train={self.shrink_train}, shrink_eval={self.shrink_eval}"


class XAN(nn.Module):
    """A batch norm with an instance norm next to it.

    The batch norm is taken over as it is, so pretrained affine and statistics are kept. ``in_init`` is what the affine of the instance norm
    starts from: ``copy_bn`` or ``ones``. A map of one position has no spread, so the instance norm is undefined there: ``tiny_maps="error"``
    says so, ``"skip"`` uses only the batch norm on such maps.
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
        """The mixed outputs."""
        batch: Tensor = self.batch_side(x)
        if math.prod(x.shape[2:]) == 1:
            return self._on_one_position(batch)
        instance_share, batch_share = torch.stack((self.score_in, self.score_bn)).softmax(dim=0).unbind()
        instance: Tensor = self.instance_side(x)
        return instance_share * instance + batch_share * batch

    def _on_one_position(self, batch: Tensor) -> Tensor:
        if self.tiny_maps == "skip":
            return batch
        raise ModelError(
            f"XAN: the map has one position per channel (shape {tuple(batch.shape[1:])}), so its instance norm is undefined there. "
            'Use larger inputs, other places (where=...), or tiny_maps="skip".'
        )


def put_xan(
    model: nn.Module,
    where: Where = "all",
    in_init: str = "copy_bn",
    instance_score: float = 1.0,
    tiny_maps: str = "error",
    part: str = "xan",
) -> nn.Module:
    """Replace the batch norms of maps at some places by XAN, in place.

    Batch norms of vectors (``BatchNorm1d``) have no positions for an instance norm and are left as they are.
    """
    candidates = {path: module for path, module in model.named_modules() if isinstance(module, MAPS)}
    if not candidates:
        raise ModelError(
            f"{part}: {type(model).__name__} has no batch norm of maps to replace. Use a model with batch norm, or leave {part} out."
        )
    chosen = set(modules_at(model, where, candidates, part))

    def make(norm: nn.Module) -> nn.Module:
        return XAN(plain_batch_norm(norm, part), in_init, instance_score, tiny_maps)

    if model in chosen:
        return make(model)
    replace_modules(model, chosen.__contains__, make)
    return model
