"""Instance norm instead of batch norm.

    per sample and channel: y = gamma_c * (x - mean_c) / sqrt(var_c + eps) + beta_c, over positions

Reference: Ulyanov et al., Instance Normalization, 2016; FedAvg+IN in FixBN Table 5.

Differences: none. It is undefined on maps of one position, which is an error that says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from polyfed.core.method import Facts, Method, register
from polyfed.layers.norms import InstanceNorm
from polyfed.layers.replace_modules import replace_batch_norms


@dataclass(frozen=True)
class ToInstanceNorm:
    """Replace every batch norm by instance norm."""

    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        return replace_batch_norms(model, lambda norm: InstanceNorm(int(norm.num_features)), "instance_norm")  # type: ignore[arg-type]


@register
def instance_norm() -> Method:
    """Replace batch norm by instance norm."""
    return Method("instance_norm", surgery=(ToInstanceNorm(),), standalone=False, facts=Facts(batch_norm=True, smallest_batch=1))
