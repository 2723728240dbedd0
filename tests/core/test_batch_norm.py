"""Batch-norm statistics estimated from batches: the three averages, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyfed.core.entries import Average, estimate_statistics


@pytest.mark.parametrize("average", ["moving", "batches", "samples"])
def test_statistics_follow_the_batches(average: Average) -> None:
    stream = torch.Generator().manual_seed(0)
    norm, dropout = nn.BatchNorm1d(2, momentum=0.25), nn.Dropout(0.5)
    model = nn.Sequential(dropout, norm)
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.fill_(3.0)
    batches = [torch.randn(size, 2, generator=stream) for size in (4, 8)]
    means, variances = [b.mean(0) for b in batches], [b.var(0) for b in batches]
    shares = {"moving": (0.75 * 0.25, 0.25), "batches": (1 / 2, 1 / 2), "samples": (1 / 3, 2 / 3)}[average]
    rest = 1 - sum(shares)
    estimate_statistics(model, batches, average)
    torch.testing.assert_close(norm.running_mean, rest * 3.0 + shares[0] * means[0] + shares[1] * means[1])
    torch.testing.assert_close(norm.running_var, rest * torch.ones(2) + shares[0] * variances[0] + shares[1] * variances[1])
    assert norm.momentum == 0.25 and not model.training and not norm.training
