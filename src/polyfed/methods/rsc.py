"""RSC: self-challenging. Differences from the paper: docs/methods/rsc.md."""

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
    """Return the mask of ones and zeros for the features."""
    z = features.detach().requires_grad_(True)
    rows = torch.arange(len(y), device=y.device)
    with torch.enable_grad():
        logits = head(z)
        (gradient,) = torch.autograd.grad(logits[rows, y].sum(), z)
    with torch.no_grad():
        # In double, so that an integer rank selects its value exactly, as numpy.percentile does.
        flat = gradient.flatten(1).double()
        unmuted = (flat < torch.quantile(flat, 1 - feature_share, dim=1, keepdim=True)).view_as(z)
        muted = head(z.detach() * unmuted)
        change = (logits.softmax(1)[rows, y] - muted.softmax(1)[rows, y]).double()
        whole = change < torch.quantile(change, 1 - batch_share)
        mask: Tensor = unmuted | whole.view(-1, *([1] * (z.dim() - 1)))
        return mask.to(z.dtype)


@dataclass(frozen=True)
class SelfChallenging(Part):
    """Loss on features without the most influential ones."""

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
    """Mute the most influential features, so that the others learn too.

        z: the head's input, h: the head
        G        = d( sum_i h(z)_i[y_i] ) / dz
        mask_f   = 1[ G < percentile_{100 (1 - f)}(G) ]                            for each sample
        change_i = softmax(h(z))_i[y_i] - softmax(h(z * mask_f))_i[y_i]
        mask     = mask_f; all ones for samples with change < percentile_{100 (1 - b)}(change)
        loss     = l(h(z * mask), y)

    Args:
        features: fraction of each sample's features that is muted; 0 disables it.
        batch: fraction of the batch with muted features: the samples whose probability decreases most; 0 disables it.

    Reference:
        Z. Huang et al. Self-Challenging Improves Cross-Domain Generalization. ECCV 2020.
    """
    if not 0 <= features < 1 or not 0 <= batch <= 1:
        raise OptionError(f"rsc: features must be in [0, 1) and batch in [0, 1], got features={features}, batch={batch}.")
    loss = SelfChallenging(features, batch) if features and batch else None
    return Method(
        "rsc",
        task_loss=loss,
        standalone=False,
        facts=Facts(class_labels=loss is not None, extra_work="three more head passes per step" if loss else ""),
    )
