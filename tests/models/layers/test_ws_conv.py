"""Convolutions with standardised weights, compared with independently computed values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from timm.layers import ScaledStdConv2d
from torch import nn

from helpers.formulas import listing_by_hand
from helpers.networks import operated
from polyfed.core.entries import entries_of
from polyfed.models.layers.ws_conv import WSConv2d
from polyfed.testing import TinyNet


@pytest.mark.parametrize("size", [1.0, 1e-4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_layer_is_listing_1_above_and_below_the_floor(groups: int, size: float) -> None:
    torch.manual_seed(0)
    layer = WSConv2d(4, 8, 3, stride=2, padding=1, groups=groups).double()
    with torch.no_grad():
        layer.weight.mul_(size)
        layer.gain.copy_(torch.rand(8, 1, 1, 1) + 0.5)
    weight, gain = layer.weight.detach().numpy(), layer.gain.detach().numpy()
    expected = listing_by_hand(weight, gain)
    assert (size < 1) == bool((weight[0].var(ddof=1) * weight[0].size) < 1e-4)
    np.testing.assert_allclose(layer.standardised_weight().detach().numpy(), expected, rtol=1e-12, atol=1e-15)
    x = torch.rand(2, 4, 7, 7, dtype=torch.float64)
    made = nn.functional.conv2d(x, torch.from_numpy(expected), layer.bias, 2, 1, 1, groups)
    torch.testing.assert_close(layer(x), made, rtol=1e-10, atol=1e-12)


def test_one_filter_worked_out_on_paper() -> None:
    layer = WSConv2d(1, 1, (1, 4), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 1, 4))
    # Mean 3; deviations -2 -1 0 3; squares 14; var 14/3; N var 56/3.
    expected = torch.tensor([-2.0, -1.0, 0.0, 3.0]) / math.sqrt(56 / 3)
    torch.testing.assert_close(layer.standardised_weight().flatten(), expected)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_layer_is_timms_up_to_the_unbiased_variance(groups: int) -> None:
    torch.manual_seed(1)
    other = ScaledStdConv2d(4, 8, 3, padding=1, groups=groups, eps=1e-12)
    layer = WSConv2d(4, 8, 3, padding=1, groups=groups)
    with torch.no_grad():
        other.gain.uniform_(0.5, 1.5)
        layer.weight.copy_(other.weight)
        layer.gain.copy_(other.gain)
        layer.bias.copy_(other.bias)  # type: ignore[union-attr, arg-type]
        count = layer.weight[0].numel()
        x = torch.rand(2, 4, 6, 6)
        bias = other.bias.view(1, -1, 1, 1)  # type: ignore[union-attr]
        torch.testing.assert_close(layer(x) - bias, (other(x) - bias) * math.sqrt((count - 1) / count), rtol=1e-4, atol=1e-6)


def test_equation_3_is_timms_without_its_gain() -> None:
    torch.manual_seed(1)
    layer = operated(nn.Sequential(nn.Conv2d(4, 8, 3)), 'fedwon(form="equation", gamma=1.7139)')[0]  # type: ignore[index]
    other = ScaledStdConv2d(4, 8, 3, padding=0, gamma=1.7139, eps=1e-12)
    other.load_state_dict(layer.state_dict() | {"gain": torch.ones(8, 1, 1, 1)})
    assert set(layer.state_dict()) == {"weight", "bias"}
    x = torch.rand(2, 4, 6, 6)
    torch.testing.assert_close(layer(x), other(x), rtol=1e-4, atol=1e-6)


def test_filters_have_zero_mean_and_norm_and_ignore_scale_and_shift() -> None:
    torch.manual_seed(2)
    layer = WSConv2d(3, 6, 5).double()
    unit = (layer.standardised_weight() / layer.gain).flatten(1)
    torch.testing.assert_close(unit.mean(1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(unit.square().sum(1), torch.full((6,), 74 / 75, dtype=torch.float64))
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(6, 1, 1, 1) + 0.5).add_(torch.randn(6, 1, 1, 1))
    torch.testing.assert_close(layer(x), before, rtol=1e-9, atol=1e-12)


def test_a_constant_filter_gives_its_bias_and_finite_gradients() -> None:
    layer = WSConv2d(2, 3, 3)
    nn.init.constant_(layer.weight, 0.7)
    out = layer(torch.rand(1, 2, 5, 5))
    torch.testing.assert_close(out, layer.bias.view(1, 3, 1, 1).expand_as(out), atol=1e-4, rtol=1e-4)  # type: ignore[union-attr]
    out.sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in layer.parameters() if p.grad is not None)


def test_the_start_is_xavier_with_torchs_own_bias() -> None:
    torch.manual_seed(0)
    layer = operated(nn.Sequential(nn.Conv2d(16, 64, 5, bias=False), nn.BatchNorm2d(64)))[0]  # type: ignore[index]
    weight, bias = layer.weight.detach(), layer.bias.detach()
    assert float(weight.std()) == pytest.approx(math.sqrt(2 / (25 * (16 + 64))), rel=0.02)
    assert float(bias.abs().max()) <= 1 / math.sqrt(16 * 25)
    assert float(bias.std()) == pytest.approx(1 / math.sqrt(16 * 25 * 3), rel=0.2)
    assert torch.equal(layer.gain, torch.ones(64, 1, 1, 1))


def test_constants_are_no_state_and_everything_is_a_weight() -> None:
    entries = entries_of(operated(TinyNet()), "head")
    assert {name: entry.kind for name, entry in entries.items() if name.startswith("stem")} == {
        "stem.0.weight": "weight",
        "stem.0.bias": "weight",
        "stem.0.gain": "weight",
    }
    assert {entry.kind for entry in entries.values()} == {"weight", "head"}
    assert entries["branch.0.gain"].shape == (8, 1, 1, 1)
