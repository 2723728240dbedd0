"""Weight standardisation: the formula, a parametrised model, and what travels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from helpers.networks import operated
from helpers.tiny_runs import built, trained
from helpers.watching import watched
from polyfed.core.method import parse
from polyfed.errors import JoinError, ModelError
from polyfed.testing import TinyNet


class WrittenOut(nn.Module):
    """Weight standardisation as a parametrisation of torch's, with the variance written out."""

    def forward(self, w: Tensor) -> Tensor:
        flat = w.flatten(1)
        n = flat.shape[1]
        centred = flat - flat.sum(1, keepdim=True) / n
        return (centred / (centred.square().sum(1, keepdim=True).div(n - 1).sqrt() + 1e-5)).view_as(w)


def test_weights_are_standardised_filter_by_filter() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2).double()
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    made = operated(copy.deepcopy(plain), "weight_standard")
    w = plain.weight.detach().numpy().reshape(6, -1)
    hat = (w - w.mean(1, keepdims=True)) / (w.std(1, ddof=1, keepdims=True) + 1e-5)
    expected = F.conv2d(x, torch.tensor(hat.reshape(6, 2, 3, 3)), plain.bias, 2, 1, groups=2)
    torch.testing.assert_close(made(x), expected, rtol=1e-12, atol=1e-12)
    assert set(made.state_dict()) == set(plain.state_dict())


def test_training_is_that_of_a_parametrised_model() -> None:
    experiment = trained("group_norm(groups=2) + weight_standard", momentum=0.9)
    torch.manual_seed(3)
    model = operated(TinyNet(), "group_norm(groups=2)")
    for convolution in (model.stem[0], model.branch[0]):  # type: ignore[index]
        parametrize.register_parametrization(convolution, "weight", WrittenOut())  # type: ignore[arg-type]
    other = trained("fedavg", model=model, momentum=0.9).server.state
    for name, value in experiment.server.state.items():
        there = name if name in other else f"{name.removesuffix('weight')}parametrizations.weight.original"
        torch.testing.assert_close(value, other[there], rtol=1e-4, atol=1e-6)


def test_group_norm_behind_it_removes_scale_and_offset_of_filters() -> None:
    torch.manual_seed(0)
    model = operated(TinyNet(), "group_norm(groups=2) + weight_standard").eval()
    x = torch.randn(3, 3, 8, 8)
    before = model(x)
    with torch.no_grad():
        model.stem[0].weight.mul_(3.0).add_(0.7)  # type: ignore[index, union-attr, operator]
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)


def test_weight_standard_travels_as_fedavg_and_says_what_it_cannot_do() -> None:
    names = set(operated(TinyNet(), "group_norm(groups=2)").state_dict())
    assert watched(built("group_norm(groups=2) + weight_standard"))[1, "train"] == (names, names)
    with pytest.raises(ModelError, match="no convolution"):
        built("weight_standard", model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))
    with pytest.raises(ModelError, match="overrides the forward pass"):
        built("weight_standard + fixup")
    constant = TinyNet()
    nn.init.zeros_(constant.branch[0].weight)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="standard deviation is 0"):
        built("weight_standard", model=constant)
    with pytest.raises(JoinError, match="convolution"):
        parse("fedwon + weight_standard")
