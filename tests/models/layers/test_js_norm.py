"""The James-Stein layer against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from helpers.formulas import factor_by_hand
from polyfed.errors import ModelError
from polyfed.models.layers.norms import JSBatchNorm, james_stein, james_stein_factor
from polyfed.models.layers.surgery import plain_batch_norm

Array = np.ndarray[Any, Any]


def layer_by_hand(x: Array, mean: Array, variance: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    shape = (1, -1) + (1,) * (x.ndim - 2)
    mean, variance = mean * factor_by_hand(mean), variance * factor_by_hand(variance)
    scaled = (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + eps)
    return weight.reshape(shape) * scaled + bias.reshape(shape)


channels = st.lists(st.floats(-100, 100).map(lambda v: round(v, 3)), min_size=3, max_size=40)


@given(channels)
def test_the_factor_is_the_formula_and_keeps_its_bounds(values: list[float]) -> None:
    factor = float(james_stein_factor(torch.tensor(values, dtype=torch.float64)))
    assert factor == pytest.approx(factor_by_hand(np.array(values)), abs=1e-9)
    assert 2 / len(values) <= factor <= 1


@given(channels, st.floats(0.01, 100))
def test_shrinking_is_scale_equivariant(values: list[float], scale: float) -> None:
    vector = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(james_stein(scale * vector), scale * james_stein(vector), rtol=1e-9, atol=1e-9)


def test_the_factor_in_special_cases() -> None:
    assert float(james_stein_factor(torch.full((7,), 3.0))) == pytest.approx(1.0)
    assert float(james_stein_factor(torch.zeros(7))) == 1.0
    assert float(james_stein_factor(torch.tensor([3.0, -4.0]))) == 1.0
    assert float(james_stein_factor(torch.tensor([1.0, -1.0, 2.0, -2.0]))) == pytest.approx(2 / 4)
    # c = 64 and r = 1: half of the entries at 0, half at 2 (mean 1, standard deviation 1).
    assert float(james_stein_factor(torch.tensor([0.0, 2.0] * 32))) == pytest.approx(1 - 62 / 64 / 2)
    tiny = torch.full((5,), 1e-25) * torch.tensor([1.0, -2.0, 3.0, 0.5, 1.0])
    assert 2 / 5 <= float(james_stein_factor(tiny)) <= 1
    zero = torch.zeros(5, requires_grad=True)
    james_stein(zero).sum().backward()  # type: ignore[no-untyped-call]
    assert zero.grad is not None and bool(torch.isfinite(zero.grad).all())


def awkward(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    scale = torch.rand((1, shape[1], *[1] * (len(shape) - 2)), generator=stream, dtype=torch.float64)
    return torch.randn(shape, generator=stream, dtype=torch.float64) * (0.3 + 2 * scale) + 3 * scale - 1


def with_affine(layer: nn.Module) -> Any:
    stream = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=stream, dtype=torch.float64))
    return layer


@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (9, 5), (4, 5, 6), (3, 2, 4, 4)])
def test_the_layer_in_training_and_evaluation(shape: tuple[int, ...]) -> None:
    layer = with_affine(JSBatchNorm(shape[1]).double())
    plain = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1]).double()
    weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
    axes = (0, *range(2, len(shape)))
    for seed in range(3):
        x = awkward(shape, seed)
        expected = layer_by_hand(x.numpy(), x.numpy().mean(axes), x.numpy().var(axes), weight, bias)
        np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-9, atol=1e-9)
        plain(x)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(layer.get_buffer(name), buffer, msg=f"{name}: buffers hold raw statistics")
    layer.eval()
    x = awkward(shape, 7)
    mean, variance = plain.running_mean.numpy(), plain.running_var.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(
        layer(x).detach().numpy(), layer_by_hand(x.numpy(), mean, variance, weight, bias), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(layer.running_mean, plain.running_mean, msg="evaluation leaves buffers alone")


def test_gradients_flow_through_the_shrinkage() -> None:
    layer = with_affine(JSBatchNorm(4).double())
    x = awkward((3, 4, 2, 2)).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))
    (through,) = torch.autograd.grad(layer(x).pow(3).sum(), x)
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    frozen = [float(james_stein_factor(v.detach())) for v in (mean, variance)]
    scale = (layer.weight * (frozen[1] * variance + layer.eps).rsqrt()).view(1, -1, 1, 1)
    y = (x - frozen[0] * mean.view(1, -1, 1, 1)) * scale + layer.bias.view(1, -1, 1, 1)
    (around,) = torch.autograd.grad(y.pow(3).sum(), x)
    assert not torch.allclose(through, around, rtol=1e-3)


def test_momentum_none_is_the_plain_mean_over_batches() -> None:
    layer, plain = JSBatchNorm(5, momentum=None).double(), nn.BatchNorm2d(5, momentum=None).double()
    for seed in range(4):
        layer(awkward((6, 5, 2, 2), seed))
        plain(awkward((6, 5, 2, 2), seed))
    torch.testing.assert_close(layer.running_var, plain.running_var)
    assert int(layer.num_batches_tracked) == 4  # type: ignore[arg-type]


def test_switched_off_it_is_batch_norm_to_the_bit() -> None:
    layer, plain = JSBatchNorm(5, shrink_train=False, shrink_eval=False), nn.BatchNorm2d(5)
    x = awkward((6, 5, 3, 3)).float()
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    bare = JSBatchNorm(5, affine=False, track_running_stats=False).eval()
    by_hand = layer_by_hand(x.numpy(), x.numpy().mean((0, 2, 3)), x.numpy().var((0, 2, 3)), np.ones(5), np.zeros(5))
    np.testing.assert_allclose(bare(x).numpy(), by_hand, rtol=1e-4, atol=1e-4)


def test_inputs_it_cannot_take_are_named() -> None:
    with pytest.raises(ModelError, match="at least two values per channel"):
        JSBatchNorm(5)(torch.zeros(1, 5))
    with pytest.raises(ModelError, match=r"\(N, C\)"):
        JSBatchNorm(5)(torch.zeros(5))
    with pytest.raises(ModelError, match="contains other layers"):
        plain_batch_norm(BatchNormAct2d(4), "fedstein")
