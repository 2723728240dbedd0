"""Adaptive gradient clipping: timm's formula, its bounds, and the head left out."""

from __future__ import annotations

import functools

import pytest
import torch
from timm.utils.agc import adaptive_clip_grad
from torch import nn

from helpers import tiny_runs
from polyfed.methods.agc import clip_units
from polyfed.testing import TinyNet

trained = functools.partial(tiny_runs.trained, rounds=3)


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (5, 7), (9, 1, 1, 1)])
def test_agc_is_timms_and_bounded(shape: tuple[int, ...]) -> None:
    stream = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, generator=stream) * 0.1)
    weight.grad = torch.randn(shape, generator=stream)
    other = nn.Parameter(weight.detach().clone())
    other.grad = weight.grad.clone()
    clip_units(weight, weight.grad, clip=0.5, eps=1e-3)
    adaptive_clip_grad([other], clip_factor=0.5, eps=1e-3)
    torch.testing.assert_close(weight.grad, other.grad)
    rows = weight.grad.flatten(1).norm(dim=1)
    assert bool((rows <= 0.5 * weight.detach().flatten(1).norm(dim=1).clamp_min(1e-3) * (1 + 1e-5)).all())
    again = weight.grad.clone()
    clip_units(weight, again, clip=0.5, eps=1e-3)
    torch.testing.assert_close(again, weight.grad)


def test_agc_takes_a_vector_as_one_unit_and_leaves_small_gradients_alone() -> None:
    bias, gradient = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    clip_units(bias, gradient, clip=1.0, eps=1e-3)
    torch.testing.assert_close(gradient, torch.tensor([3.0, 4.0]))
    small = torch.tensor([0.3, 0.4])
    clip_units(bias, small, clip=1.0, eps=1e-3)
    assert torch.equal(small, torch.tensor([0.3, 0.4]))
    zero = torch.zeros(2)
    clip_units(torch.zeros(2), zero, clip=1.0, eps=1e-3)
    assert torch.equal(zero, torch.zeros(2))


def test_agc_along_inputs_clips_columns_of_matrices_only() -> None:
    stream = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(5, 7, generator=stream) * 0.1, torch.randn(5, 7, generator=stream)
    columns = gradient.clone()
    clip_units(weight, columns, clip=0.5, eps=1e-3, linear="inputs")
    torch.testing.assert_close(columns.norm(dim=0), 0.5 * weight.norm(dim=0))
    torch.testing.assert_close(columns / columns.norm(dim=0), gradient / gradient.norm(dim=0))
    transposed = gradient.T.clone()
    clip_units(weight.T, transposed, clip=0.5, eps=1e-3)
    torch.testing.assert_close(columns, transposed.T)
    for shape in ((6, 4, 3, 3), (7,)):
        weight, gradient = torch.randn(shape, generator=stream) * 0.1, torch.randn(shape, generator=stream)
        other = gradient.clone()
        clip_units(weight, gradient, clip=0.5, eps=1e-3)
        clip_units(weight, other, clip=0.5, eps=1e-3, linear="inputs")
        assert torch.equal(gradient, other)


def test_agc_along_inputs_reaches_training() -> None:
    rows, columns = (trained(f'agc(clip=0.01, linear="{units}")', rounds=1).server.state for units in ("outputs", "inputs"))
    assert not torch.equal(rows["head.weight"], columns["head.weight"])


def test_agc_can_spare_the_head() -> None:
    spared = trained('agc(clip=0.001, exclude="head")', rounds=1).server.state
    all_clipped = trained("agc(clip=0.001)", rounds=1).server.state
    free = trained("fedavg", rounds=1).server.state

    def moved(state: dict[str, torch.Tensor], name: str) -> float:
        torch.manual_seed(3)
        return float((state[name] - TinyNet().state_dict()[name]).norm())

    assert moved(spared, "head.weight") > 5 * moved(all_clipped, "head.weight")
    assert moved(spared, "stem.0.weight") < 0.2 * moved(free, "stem.0.weight")
