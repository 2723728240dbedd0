"""Running statistics of batch norm, for layers that normalise in a way of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.core.batch_norm import BatchNorm


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
