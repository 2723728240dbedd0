"""group_norm, layer_norm, instance_norm and no_norm: formulas, and what is put where batch norm was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from polyfed.core.method import parse
from polyfed.errors import ModelError
from polyfed.methods.norm_swaps import ToGroupNorm
from polyfed.testing import TinyNet


def norm_by_hand(x: np.ndarray[Any, Any], groups: int, eps: float = 1e-5) -> np.ndarray[Any, Any]:
    n, c = x.shape[:2]
    parts = x.reshape(n, groups, -1)
    out = (parts - parts.mean(-1, keepdims=True)) / np.sqrt(parts.var(-1, keepdims=True) + eps)
    return out.reshape(n, c, *x.shape[2:])


@pytest.mark.parametrize(("text", "groups"), [("group_norm(groups=2)", 2), ("layer_norm", 1), ("instance_norm", 8)])
def test_swapped_norms_compute_the_formula_and_hold_no_statistics(text: str, groups: int) -> None:
    model = parse(text).surgery[0](TinyNet())
    x = torch.rand(2, 8, 4, 4)
    assert not any("running" in name for name in model.state_dict())
    np.testing.assert_allclose(model.stem[1](x).detach().numpy(), norm_by_hand(x.numpy(), groups), rtol=1e-4, atol=1e-5)


def test_groups_by_layer_as_in_fedwon_table_5() -> None:
    model = ToGroupNorm((4, 2))(TinyNet())
    assert [m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)] == [4, 2]
    with pytest.raises(Exception, match="groups has 3 numbers"):
        ToGroupNorm((4, 2, 2))(TinyNet())
    with pytest.raises(Exception, match="do not divide"):
        ToGroupNorm((3, 2))(TinyNet())


def test_no_norm_puts_biases_of_zero_where_batch_norm_carried_the_shift() -> None:
    model = parse("no_norm").surgery[0](TinyNet())
    assert torch.equal(model.stem[0].bias, torch.zeros(8))
    assert isinstance(model.stem[1], nn.Identity)


@pytest.mark.parametrize("text", ["group_norm", "layer_norm", "instance_norm", "no_norm"])
def test_swaps_without_anything_to_swap_are_an_error(text: str) -> None:
    with pytest.raises(ModelError, match="no batch norm"):
        parse(text).surgery[0](nn.Sequential(nn.Linear(3, 3)))


def test_activations_fused_into_a_batch_norm_outlive_it() -> None:
    fused = nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct2d(8, act_layer=nn.SiLU))
    x = torch.rand(2, 3, 6, 6)
    swapped = parse("group_norm(groups=2)").surgery[0](fused)
    expected = nn.functional.silu(nn.functional.group_norm(swapped[0](x), 2))
    torch.testing.assert_close(swapped(x), expected)
