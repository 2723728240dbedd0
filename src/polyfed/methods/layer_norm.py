"""Layer norm instead of batch norm: group norm with one group, and an affine per channel (FedWon A.2).

    per sample: y = gamma_c * (x - mean) / sqrt(var + eps) + beta_c, over all channels and positions

Reference: Ba et al., Layer Normalization, 2016; FedAvg+LN in FedWon.

Differences: it is not torch's ``LayerNorm``, whose affine is per element.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from polyfed.core.method import Facts, Method, register
from polyfed.layers.replace_modules import replace_batch_norms


@dataclass(frozen=True)
class ToLayerNorm:
    """Replace every batch norm by group norm with one group."""

    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        return replace_batch_norms(model, lambda norm: nn.GroupNorm(1, int(norm.num_features)), "layer_norm")  # type: ignore[arg-type]


@register
def layer_norm() -> Method:
    """Replace batch norm by layer norm."""
    return Method("layer_norm", surgery=(ToLayerNorm(),), standalone=False, facts=Facts(batch_norm=True, smallest_batch=1))
