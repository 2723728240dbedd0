"""DSON: a learned mixture of batch and instance statistics. Differences from the paper: docs/methods/dson.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyfed.core.entries import MIX, BatchNorm
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.sharing import batch_norm, keep_local
from polyfed.errors import ModelError
from polyfed.models.layers.norms import track
from polyfed.models.layers.surgery import replace_map_norms


class DSON(BatchNorm):
    """A batch norm that mixes its statistics with those of each sample, for inputs (N, C, ...)."""

    entry_kinds: ClassVar[dict[str, str]] = {"score": MIX}

    def __init__(self, norm: BatchNorm, score: float = 0.0, exact: bool = True) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        anchor = next((tensor for tensor in (*norm.parameters(), *norm.buffers())), torch.empty(0))
        self.to(device=anchor.device, dtype=anchor.dtype)
        self.load_state_dict(norm.state_dict())
        self.score = nn.Parameter(anchor.new_tensor(float(score)))
        self.exact = exact
        self.train(norm.training)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 3:
            raise ModelError(f"DSON requires maps of shape (N, C, ...), got {tuple(input.shape)}.")

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        axes, shape = tuple(range(2, x.dim())), (1, -1, *([1] * (x.dim() - 2)))
        own_mean = x.mean(axes, keepdim=True)
        own_variance = (x - own_mean).square().mean(axes, keepdim=True)
        mean, variance = (value.view(shape) for value in self._batch_statistics(x, own_mean, own_variance))
        share = torch.sigmoid(self.score)
        mixed_variance = share * variance + (1 - share) * own_variance
        if self.exact:
            mixed_variance = mixed_variance + share * (1 - share) * (mean - own_mean).square()
        y = (x - share * mean - (1 - share) * own_mean) * torch.rsqrt(mixed_variance + self.eps)
        return y * self.weight.view(shape) + self.bias.view(shape) if self.affine else y

    def _batch_statistics(self, x: Tensor, own_mean: Tensor, own_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return batch statistics in training and running statistics in evaluation, one value per channel."""
        if not self.training and self.running_mean is not None and self.running_var is not None:
            return self.running_mean, self.running_var
        count = x.numel() // x.shape[1]
        if count < 2:
            raise ModelError(f"DSON needs more than one value per channel in training, got an input of {tuple(x.shape)}.")
        means, variances = own_mean.flatten(1), own_variance.flatten(1)
        mean = means.mean(0)
        # All samples have the same number of positions, so the batch variance is the mean within samples plus the variance between them.
        variance = variances.mean(0) + (means - mean).square().mean(0)
        if self.training:
            track(self, mean.detach(), variance.detach() * (count / (count - 1)))
        return mean, variance


@dataclass(frozen=True)
class ToDSON(Part):
    """Replace every batch norm of feature maps. Batch norms of vectors have no positions and are unchanged."""

    score: float
    exact: bool
    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        return replace_map_norms(model, lambda norm: DSON(norm, self.score, self.exact), "dson", "Use a model with batch norm.")


@register
def dson(domain_specific: bool = False, score: float = 0.0, exact: bool = True) -> Method:
    """Normalise with a learned mixture of batch and instance statistics.

        w      = sigmoid(score), one score per layer
        mu     = w mu_bn + (1 - w) mu_in
        sigma2 = w sigma2_bn + (1 - w) sigma2_in + w (1 - w) (mu_bn - mu_in)^2
        y      = gamma (x - mu) / sqrt(sigma2 + eps) + beta

    Args:
        domain_specific: keep affine, statistics and mixture at the client; --newcomer ensemble then works best for newcomers.
        score: initial score of the batch statistics, whose weight is sigmoid(score); 0: 0.5.
        exact: use the variance of the mixture; False: the mixture of the variances.

    Reference:
        S. Seo et al. Learning to Optimize Domain Specific Normalization for Domain Generalization. ECCV 2020.
    """
    return Method(
        "dson",
        surgery=(ToDSON(score, exact),),
        sharing=(keep_local(batch_norm),) if domain_specific else (),
        standalone=False,
        facts=Facts(
            batch_norm=True, client_state=domain_specific, extra_work="statistics of each sample, in addition to those of the batch"
        ),
    )
