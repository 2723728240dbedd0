"""Gradients clipped per sample equal a loop over the samples, for all layers with a special implementation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.errors import ModelError
from polyfed.methods.fixup import ScalarShift
from polyfed.models.layers.ws_conv import WSConv1d, WSConv2d

pytest.importorskip("opacus", reason="needs the privacy extra")

from polyfed.models.layers.sample_gradients import clipped_gradients, gram_is_cheaper, norm_samplers


def head(flat: int) -> list[nn.Module]:
    return [nn.ReLU(), nn.Flatten(), nn.Linear(flat, 5)]


class Twice(nn.Module):
    """One layer used twice: the norm of the sum is not the sum of the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))  # type: ignore[no-any-return]


class OwnParameter(nn.Module):
    """A parameter of the model itself, next to layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(12) + 0.5)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)  # type: ignore[no-any-return]


class ChannelsLast(nn.Module):
    """A linear layer at every place of an image, as in ConvNeXt: opacus has no norms for four dimensions."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    norm = nn.BatchNorm2d(8).eval()
    norm.running_mean, norm.running_var = torch.rand(8), torch.rand(8) + 0.5
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, *head(8 * 36))


NETWORKS = {
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), *head(8 * 36)),
    "groups, stride, no bias": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3, stride=2, bias=False), *head(6 * 9)),
    "dilation, reflected": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=2, dilation=2, padding_mode="reflect"), *head(4 * 64)),
    "same": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), *head(4 * 64)),
    "few places": lambda: nn.Sequential(nn.Conv2d(3, 64, 4, stride=4), *head(64 * 4)),
    "group norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), *head(8 * 36)),
    "frozen batch norm": frozen,
    "standardised": lambda: nn.Sequential(WSConv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), WSConv2d(8, 8, 3), *head(8 * 36)),
    "standardised, few places": lambda: nn.Sequential(WSConv2d(3, 64, 4, stride=4, groups=1), *head(64 * 4)),
    "standardised, groups": lambda: nn.Sequential(WSConv2d(3, 6, 3, groups=3), *head(6 * 36)),
    "standardised, at the floor": lambda: nn.Sequential(WSConv2d(3, 8, 3, floor=1e9), *head(8 * 36)),
    "standardised, at the floor, few places": lambda: nn.Sequential(WSConv2d(3, 64, 4, stride=4, floor=1e9), *head(64 * 4)),
    "standardised, equation": lambda: nn.Sequential(
        WSConv2d(3, 8, 3, learn_gain=False, unbiased=False, floor=1e-30), *head(8 * 36)
    ),
    "scalar": lambda: nn.Sequential(nn.Flatten(), ScalarShift(torch.zeros(1)), nn.Linear(192, 5)),
    "one dimension": lambda: nn.Sequential(nn.Flatten(2), WSConv1d(3, 4, 5), *head(4 * 60)),
    "used twice": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 12), Twice()),
    "linear on images": lambda: nn.Sequential(ChannelsLast(nn.Linear(3, 4)), *head(4 * 64)),
    "own parameter": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 12), OwnParameter()),
}


def by_loop(model: nn.Module, x: Tensor, y: Tensor, clip: float) -> tuple[Tensor, list[Tensor]]:
    """Norms and clipped sum, one sample after the other."""
    parameters = list(model.parameters())
    norms, total = [], [torch.zeros_like(p) for p in parameters]
    for row in range(len(x)):
        gradients = torch.autograd.grad(F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]), parameters)
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)))
        for place, gradient in enumerate(gradients):
            total[place] += gradient * min(1.0, clip / norms[-1])
    return torch.tensor(norms, dtype=x.dtype), total


@pytest.mark.parametrize("name", NETWORKS)
def test_clipping_by_sample_is_a_loop_over_the_samples(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    x, y = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 5
    norms, _ = by_loop(model, x, y, 1.0)
    clip = float(norms.median())  # so that some samples are clipped and some are not
    norms, total = by_loop(model, x, y, clip)
    found = clipped_gradients(model, lambda: F.cross_entropy(model(x), y, reduction="none"), clip)
    torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=1e-12)
    for parameter, wanted in zip(model.parameters(), total, strict=True):
        torch.testing.assert_close(found.gradients[parameter], wanted, rtol=1e-9, atol=1e-12)


def test_both_ways_to_a_norm_are_tried_above() -> None:
    many, few = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 64, 4, stride=4)
    assert not gram_is_cheaper(many, 36) and gram_is_cheaper(few, 4)
    assert {nn.Conv2d, WSConv2d, nn.Linear} <= set(norm_samplers())


def test_no_sample_weighs_more_than_the_clip() -> None:
    torch.manual_seed(0)
    model = NETWORKS["standardised"]()
    x, y = 50 * torch.randn(1, 3, 8, 8), torch.tensor([2])
    found = clipped_gradients(model, lambda: F.cross_entropy(model(x), y, reduction="none"), 0.25)
    assert float(found.norms) > 0.25
    length = torch.stack([g.square().sum() for g in found.gradients.values()]).sum().sqrt()
    assert float(length) == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("inputs", "losses"), [(1.0, 1e-26), (1e15, 1e-32), (1e-25, 1e30)])
def test_no_gradient_is_too_small_or_too_large_to_be_clipped(name: str, inputs: float, losses: float) -> None:
    """Squares in single precision vanish below 1e-22: a server chooses weights for that, and a clip that is smaller still."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    x, y = inputs * torch.randn(6, 3, 8, 8), torch.arange(6) % 5

    def wanted() -> Tensor:
        return losses * F.cross_entropy(model(x), y, reduction="none")

    whole = [torch.autograd.grad(wanted()[row], list(model.parameters())) for row in range(6)]
    norms = torch.stack([torch.stack([g.double().square().sum() for g in each]).sum().sqrt() for each in whole])
    found = clipped_gradients(model, wanted, float(norms.min()) / 100)
    torch.testing.assert_close(found.norms.double(), norms, rtol=1e-2, atol=0.0)
    length = torch.stack([g.double().square().sum() for g in found.gradients.values()]).sum().sqrt()
    assert float(length) <= 1.01 * 6 * float(norms.min()) / 100


def test_batch_norm_that_looks_at_the_batch_has_no_gradients_by_sample() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *head(4 * 36))
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    with pytest.raises(ModelError, match="no per-sample gradients"):
        clipped_gradients(model, lambda: F.cross_entropy(model(x), y, reduction="none"), 1.0)


def test_no_hook_stays_behind() -> None:
    model = NETWORKS["convolution"]()
    x, y = torch.randn(2, 3, 8, 8), torch.arange(2)
    clipped_gradients(model, lambda: F.cross_entropy(model(x), y, reduction="none"), 1.0)
    assert not any(module._forward_hooks for module in model.modules())
