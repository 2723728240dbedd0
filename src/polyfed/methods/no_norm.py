"""No norm: every batch norm becomes the identity; layers that had no bias because of it get one of zeros.

Reference: "FedAvg w/o BN" in FedWon Figure 3 and Tables 4, 12, 18. It can diverge at large batches; that is its finding.

Differences: none known.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from polyfed.core.method import Facts, Method, register
from polyfed.layers.replace_modules import add_missing_biases, replace_batch_norms


@dataclass(frozen=True)
class DropNorm:
    """Replace every batch norm by the identity."""

    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        model = replace_batch_norms(model, lambda _: nn.Identity(), "no_norm")
        add_missing_biases(model)
        return model


@register
def no_norm() -> Method:
    """Take batch norm out."""
    return Method("no_norm", surgery=(DropNorm(),), standalone=False, facts=Facts(batch_norm=True, smallest_batch=1))
