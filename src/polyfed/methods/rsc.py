"""RSC: self-challenging; the features that decide most are muted, and the rest must do.

    G = d( sum_i h(z)_i[y_i] ) / dz,   z: the head's input, h: the head
    mask_f = 1[ G < percentile_{100 (1 - f)}(G) ], sample by sample
    change_i = softmax(h(z))_i[y_i] - softmax(h(z * mask_f))_i[y_i]
    mask = mask_f, and all ones for samples whose change lies below the percentile 100 (1 - b) of the batch
    loss = l(h(z * mask), y)

The feature extractor runs once, so batch norm sees each batch once. ``fedavg + rsc`` is the baseline of federated domain generalisation papers.

Reference: Huang et al., Self-Challenging Improves Cross-Domain Generalization, ECCV 2020.

Differences from the paper: this is the form of DomainBed (also in the federated program of CCST), on the pooled feature; the original mutes positions or
channels of the last feature map, half of the time each, for a share of samples that grows with the epochs. The loss l is the loss of the run.
Defaults: f = b = 1/3, as in both programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polyfed.core.client import Step
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.workbench import Workbench
from polyfed.errors import OptionError


def challenge(head: nn.Module, features: Tensor, y: Tensor, feature_share: float, batch_share: float) -> Tensor:
    """The mask of ones and zeros that features are multiplied by."""
    z = features.detach().requires_grad_(True)
    rows = torch.arange(len(y), device=y.device)
    with torch.enable_grad():
        logits = head(z)
        (gradient,) = torch.autograd.grad(logits[rows, y].sum(), z)
    with torch.no_grad():
        # In double, so that a rank that is a whole number meets its value exactly, as numpy.percentile does.
        flat = gradient.flatten(1).double()
        unmuted = (flat < torch.quantile(flat, 1 - feature_share, dim=1, keepdim=True)).view_as(z)
        muted = head(z.detach() * unmuted)
        change = (logits.softmax(1)[rows, y] - muted.softmax(1)[rows, y]).double()
        whole = change < torch.quantile(change, 1 - batch_share)
        mask: Tensor = unmuted | whole.view(-1, *([1] * (z.dim() - 1)))
        return mask.to(z.dtype)


@dataclass(frozen=True)
class SelfChallenging(Part):
    """The loss of the run on features without those that decide most."""

    feature_share: float
    batch_share: float
    needs_features = True

    def __call__(self, step: Step) -> Tensor:
        bench, features = step.client.bench, step.features
        assert features is not None
        mask = challenge(bench.head_module, features, step.y, self.feature_share, self.batch_share)
        return bench.loss(bench.head_module(features * mask), step.y)

    def check(self, bench: Workbench) -> None:
        bench.require_head(f"{bench.method}: rsc")


@register
def rsc(features: float = 1 / 3, batch: float = 1 / 3) -> Method:
    """Mute the features that decide most, so that the others learn too.

    Args:
        features: share of each sample's features that is muted; 0 changes nothing.
        batch: share of the batch they are muted for: the samples that suffer most; 0 changes nothing.
    """
    if not 0 <= features < 1 or not 0 <= batch <= 1:
        raise OptionError(
            f"rsc: features lies between 0 and 1 (less than 1), batch between 0 and 1, found features={features}, batch={batch}."
        )
    loss = SelfChallenging(features, batch) if features and batch else None
    return Method(
        "rsc",
        task_loss=loss,
        standalone=False,
        facts=Facts(class_labels=loss is not None, extra_work="three more head passes per step" if loss else ""),
    )
