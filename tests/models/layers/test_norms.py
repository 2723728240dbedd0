"""Norm layers, and how modules are replaced by them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.networks import used_norm
from polyfed.core.entries import entries_of
from polyfed.errors import ModelError
from polyfed.models.layers.norms import XAN, InstanceNorm
from polyfed.models.layers.surgery import replace_modules


def test_instance_norm_on_single_positions_says_so() -> None:
    assert {entry.layer for entry in entries_of(InstanceNorm(4)).values()} == {"instance_norm"}
    with pytest.raises(ModelError, match="one position"):
        InstanceNorm(4)(torch.zeros(2, 4, 1, 1))


def test_modules_are_replaced_in_the_order_of_the_model() -> None:
    inner = nn.Sequential(nn.BatchNorm2d(1), nn.BatchNorm2d(2))
    model = nn.Sequential(inner, nn.BatchNorm2d(3), inner)
    seen: list[int] = []

    def noted(norm: nn.Module) -> nn.Module:
        seen.append(norm.num_features)  # type: ignore[arg-type]
        return nn.Identity()

    assert replace_modules(model, lambda module: isinstance(module, nn.BatchNorm2d), noted) == 3
    assert seen == [1, 2, 3] and not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert model[0] is model[2]


@pytest.mark.parametrize("training", [True, False])
def test_xan_is_torchs_two_norms_mixed_by_a_softmax(training: bool) -> None:
    layer = XAN(used_norm(), in_init="ones")
    with torch.no_grad():
        layer.score_in.fill_(0.3)
        layer.score_bn.fill_(-0.4)
        layer.instance_side.weight.copy_(torch.rand(6))
        layer.instance_side.bias.copy_(torch.rand(6))
    batch, instance = used_norm(), nn.InstanceNorm2d(6, affine=True)
    instance.load_state_dict(layer.instance_side.state_dict())
    for module in (layer, batch, instance):
        module.train(training)
    x = torch.randn(5, 6, 4, 3) * 2 + 1
    share = 1 / (1 + torch.exp(torch.tensor(-0.4 - 0.3)))
    torch.testing.assert_close(layer(x), share * instance(x) + (1 - share) * batch(x), rtol=1e-5, atol=1e-5)
    for name, value in batch.state_dict().items():
        torch.testing.assert_close(layer.batch_side.state_dict()[name], value)


def test_xan_starts_equal_and_its_scores_learn() -> None:
    layer = XAN(used_norm())
    x = torch.randn(5, 6, 4, 3)
    instance = F.instance_norm(x, weight=layer.batch_side.weight, bias=layer.batch_side.bias)
    torch.testing.assert_close(layer(x), 0.5 * instance + 0.5 * used_norm()(x), rtol=1e-5, atol=1e-5)
    layer(x).pow(3).sum().backward()
    assert layer.score_in.grad is not None and layer.score_bn.grad is not None
    assert float(layer.score_in.grad) == pytest.approx(-float(layer.score_bn.grad), rel=1e-2) != 0


def test_xan_classes_its_entries_and_keeps_pretrained_values() -> None:
    norm = used_norm()
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    layer = XAN(norm.eval())
    kinds = {name: (entry.kind, entry.layer) for name, entry in entries_of(layer).items()}
    assert kinds["score_in"] == kinds["score_bn"] == ("mix", "xan")
    assert kinds["batch_side.weight"] == ("norm_affine", "batch_norm")
    assert kinds["batch_side.running_var"] == ("norm_stat", "batch_norm")
    assert kinds["instance_side.bias"][0] == "norm_affine" and kinds["instance_side.bias"][1] != "batch_norm"
    assert all(torch.equal(value, before[name]) for name, value in layer.batch_side.state_dict().items())
    assert torch.equal(layer.instance_side.weight, before["weight"]) and not layer.training
    assert torch.equal(XAN(norm, in_init="ones").instance_side.weight, torch.ones(6))
    assert XAN(nn.BatchNorm2d(6, affine=False).double()).score_in.dtype == torch.float64


def test_maps_of_one_position_say_so_or_use_the_batch_norm_alone() -> None:
    x = torch.randn(5, 6, 1, 1)
    with pytest.raises(ModelError, match=r'one position.*tiny_maps="skip"'):
        XAN(used_norm())(x)
    torch.testing.assert_close(XAN(used_norm(), tiny_maps="skip")(x), used_norm()(x))
