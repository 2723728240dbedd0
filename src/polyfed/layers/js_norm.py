"""Batch norm with James-Stein estimates of the channels' means and variances.

    JS(v) = (1 - (c - 2) * s2(v) / ||v||^2) * v,   v: the c channel means, or the c channel variances; s2: their variance across channels (1/c)
    y = gamma * (x - JS(mu)) / sqrt(JS(sigma2) + eps) + beta

Since s2(v) <= ||v||^2 / c, the factor lies in [2/c, 1]: shrunk variances stay positive. It is 1 for c <= 2 and for v = 0.
Buffers hold raw statistics, so averaging and shrinking never compounds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.batch_norm import BatchNorm
from polyfed.errors import ModelError
from polyfed.layers.running_statistics import track


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
