"""Normalisation layers that stand in for batch norm."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.errors import ModelError


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
