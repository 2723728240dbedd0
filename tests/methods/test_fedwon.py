"""FedWon: the surgery on real models, folding, identities."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import Tensor, nn

from helpers.formulas import listing_by_hand
from helpers.networks import operated, parameters
from helpers.tiny_runs import built, trained
from polyfed.core.entries import entries_of
from polyfed.core.method import parse
from polyfed.data.registry import data_sets
from polyfed.errors import JoinError, ModelError, OptionError, SharingError
from polyfed.methods.fedwon import fedwon, fold, is_norm
from polyfed.models import models
from polyfed.models.layers.norms import InstanceNorm
from polyfed.models.layers.ws_conv import WSConv1d, WSConv2d, WSConv3d
from polyfed.runs.result import Result
from polyfed.testing import TinyNet

BUILDERS: dict[str, tuple[Any, int, int]] = {
    # A gain and a bias replace the scale and shift of each norm: as many numbers as before.
    "resnet18": (lambda: torchvision.models.resnet18(), 11_689_512, 20),
    "mobilenet_v2": (lambda: torchvision.models.mobilenet_v2(), 3_504_872, 52),
    # Here convolutions had a bias already: 1,152 gains for 2,304 numbers of norms.
    "alexnet": (lambda: models.build("alexnet_fedwon", classes=10, input_shape=(3, 64, 64)), 57_047_114 - 1_152, 5),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_surgery_on_the_papers_models(name: str) -> None:
    build, count, convolutions = BUILDERS[name]
    model = operated(build())
    assert not any(is_norm(module) or isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    found = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(found) == convolutions and all(isinstance(module, WSConv2d) for module in found)
    assert all(module.bias is not None for module in found)
    assert parameters(model) == count
    assert {entry.kind for entry in entries_of(model).values()} == {"weight"}
    model.eval()
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        logits, alone = model(x), model(x[:1])
    assert logits.shape == (2, 10 if name == "alexnet" else 1000)
    torch.testing.assert_close(logits[:1], alone, rtol=1e-3, atol=1e-4)


def test_depthwise_filters_are_standardised_over_nine_weights() -> None:
    model = operated(torchvision.models.mobilenet_v2())
    depthwise = [m for m in model.modules() if isinstance(m, WSConv2d) and m.groups > 1]
    assert len(depthwise) == 17 and all(m.fan_in == 9 for m in depthwise)
    torch.testing.assert_close(depthwise[3].standardised_weight().flatten(1).square().sum(1), torch.full((144,), 8 / 9))


def test_bias_keep_adds_none() -> None:
    kept = operated(TinyNet(), 'fedwon(bias="keep")')
    assert kept.stem[0].bias is None and kept.branch[0].bias is not None  # type: ignore[index, union-attr]


def test_geometry_survives() -> None:
    convolution = nn.Conv2d(4, 8, (3, 5), (2, 1), (1, 2), (2, 1), 2, padding_mode="circular")
    made = operated(nn.Sequential(convolution))[0]  # type: ignore[index]
    x = torch.rand(1, 4, 12, 12)
    assert made(x).shape == convolution(x).shape
    with torch.no_grad():
        convolution.weight.copy_(made.standardised_weight())
        convolution.bias.copy_(made.bias)  # type: ignore[union-attr]
    torch.testing.assert_close(made(x), convolution(x))


@pytest.mark.parametrize(("plain", "kind"), [(nn.Conv1d, WSConv1d), (nn.Conv3d, WSConv3d)])
def test_other_dimensions(plain: Any, kind: Any) -> None:
    model = operated(nn.Sequential(plain(2, 4, 3), nn.GroupNorm(2, 4)))
    layer = model[0]  # type: ignore[index]
    assert isinstance(layer, kind) and isinstance(model[1], nn.Identity)  # type: ignore[index]
    expected = listing_by_hand(layer.weight.detach().double().numpy(), layer.gain.detach().double().numpy())
    np.testing.assert_allclose(layer.standardised_weight().detach().numpy(), expected, rtol=1e-4, atol=1e-6)


def test_every_family_of_norms_goes_or_only_batch_norm() -> None:
    def model() -> nn.Sequential:
        norms = (nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm((4, 6, 6)), InstanceNorm(4))
        return nn.Sequential(nn.Conv2d(3, 4, 3), *norms)

    assert [type(module) for module in operated(model()).children()] == [WSConv2d] + [nn.Identity] * 5
    assert [isinstance(m, nn.Identity) for m in operated(model(), 'fedwon(norms="batch")').children()] == [False, True] + [
        False
    ] * 4


def test_what_a_norm_holds_besides_stays() -> None:
    model = operated(nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4)))
    x = torch.rand(2, 3, 6, 6)
    torch.testing.assert_close(model(x), model[0](x).relu())  # type: ignore[index]
    assert bool((model(x) == 0).any())
    network = operated(timm.create_model("mobilenetv2_050", num_classes=5))
    assert any(isinstance(module, nn.ReLU6) for module in network.modules())
    assert network(torch.rand(1, 3, 32, 32)).shape == (1, 5)


def test_filters_of_one_weight_stay_plain() -> None:
    model = operated(nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 2, 1)))
    assert [type(module) for module in model.children()] == [nn.Conv2d, nn.Conv2d, WSConv2d]
    with pytest.raises(ModelError, match="single weight"):
        WSConv2d(1, 4, 1)


def test_named_convolutions_stay_plain() -> None:
    text = 'fedwon(plain=("body.conv3",))'
    model = operated(models.build("alexnet_fedwon", classes=10, input_shape=(3, 64, 64)), text)
    assert [type(m) is nn.Conv2d for m in model.modules() if isinstance(m, nn.Conv2d)] == [False, False, True, False, False]
    with pytest.raises(OptionError, match=r"no such convolution.*stem\.0"):
        operated(TinyNet(), 'fedwon(plain=("stem.1",))')


def test_what_cannot_be_standardised_is_an_error() -> None:
    with pytest.raises(ModelError, match="no convolution"):
        operated(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    with pytest.raises(ModelError, match="Conv2dSame"):
        operated(nn.Sequential(Conv2dSame(3, 4, 3)))


def warmed(model: nn.Module, centred: bool) -> nn.Module:
    """A model whose batch norms have seen something; on demand with filters of zero mean, which standardising leaves alone."""
    torch.manual_seed(4)
    for module in model.double().modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        if centred and isinstance(module, nn.Conv2d):
            with torch.no_grad():
                module.weight -= module.weight.mean(dim=(1, 2, 3), keepdim=True)
    return model.eval()


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (TinyNet, 'fedwon(init="keep", bias="keep", gamma=1.7139)'),
        (lambda: torchvision.models.resnet18(num_classes=5), 'fedwon(init="keep")'),
    ],
)
def test_kept_weights_preserve_the_function_up_to_the_filters_mean(build: Any, text: str) -> None:
    model = warmed(build(), centred=True)
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(operated(copy.deepcopy(model), text)(x), model(x), rtol=1e-9, atol=1e-9)


def test_kept_weights_follow_the_formula() -> None:
    model = warmed(TinyNet(), centred=False)
    convolution, norm = model.branch[0], model.branch[1]  # type: ignore[index]
    weight = convolution.weight.detach().clone()
    made = operated(copy.deepcopy(model), 'fedwon(init="keep")').branch[0]  # type: ignore[index]
    n = 8 * 9
    lengths = (weight - weight.mean(dim=(1, 2, 3), keepdim=True)).flatten(1).norm(dim=1)
    root = (norm.running_var + 1e-5).sqrt()
    assert torch.equal(made.weight, weight)
    torch.testing.assert_close(made.gain.flatten(), math.sqrt(n / (n - 1)) * lengths * norm.weight / root)
    torch.testing.assert_close(made.bias, norm.bias + norm.weight * (convolution.bias - norm.running_mean) / root)


def test_kept_weights_where_convolutions_stay_plain() -> None:
    model = warmed(TinyNet(), centred=True)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    made = operated(copy.deepcopy(model), 'fedwon(init="keep", plain=("stem.*",))')
    assert type(made.stem[0]) is nn.Conv2d  # type: ignore[index]
    torch.testing.assert_close(made(x), model(x), rtol=1e-9, atol=1e-9)


class Winding(TinyNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.mean()) > 0 else -x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: torchvision.models.densenet121(num_classes=3), "cannot fold features.denseblock1.denselayer1.norm1"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), "GroupNorm"),
        (Winding, "torch.fx cannot trace"),
    ],
)
def test_norms_that_cannot_be_folded_say_so(model: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        operated(model(), 'fedwon(init="keep")')


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_folding_changes_nothing_but_the_layers(dtype: torch.dtype, close: float) -> None:
    torch.manual_seed(0)
    model = operated(torchvision.models.resnet18(num_classes=5)).to(dtype).eval()
    for module in model.modules():
        if isinstance(module, WSConv2d):
            nn.init.uniform_(module.gain, 0.5, 1.5)  # type: ignore[arg-type]
    stream = torch.get_rng_state()
    folded = fold(model)
    assert torch.equal(stream, torch.get_rng_state())
    assert {type(m) for m in folded.modules() if isinstance(m, nn.Conv2d)} == {nn.Conv2d}
    assert any(isinstance(module, WSConv2d) for module in model.modules())
    x = torch.rand(3, 3, 48, 48, dtype=dtype)
    with torch.no_grad():
        before, after = model(x), folded(x)
    assert float((after - before).abs().max()) <= close * float(before.abs().max())


def test_a_trained_model_folds_to_the_same_accuracy() -> None:
    experiment = trained("fedwon")
    model = Result(experiment, []).model_for("big")
    x = torch.rand(5, 3, 8, 8)
    torch.testing.assert_close(fold(model)(x), model(x), rtol=1e-5, atol=1e-6)


def test_fedwon_is_fedavg_on_the_operated_model() -> None:
    experiment = trained("fedwon")
    start = operated(TinyNet())
    start.load_state_dict(experiment.bench.initial)
    assert Result(trained("fedavg", model=start), []).digest == Result(experiment, []).digest


def test_everything_travels_both_ways() -> None:
    bench = trained("fedwon").bench
    phase = bench.plan.at(1)
    assert set(phase.up) == set(phase.down) == set(bench.model.state_dict())
    assert {"stem.0.gain", "branch.0.gain"} <= set(phase.up) and not phase.kept
    assert not any("eps" in name or "fan_in" in name or "running" in name for name in phase.up)


def test_gains_learn() -> None:
    state = trained("fedwon").server.state
    assert not torch.equal(state["stem.0.gain"], torch.ones(8, 1, 1, 1))


@pytest.mark.parametrize("batch", [1, 2])
def test_tiny_batches_train(batch: int) -> None:
    state = trained("fedwon", batch_size=batch, lr=0.01).server.state
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


def test_what_it_joins_with() -> None:
    assert str(parse("fedwon + agc(clip=0.64)")) == "fedwon + agc(clip=0.64)"
    assert str(parse("fedavg + fedwon")) == "fedwon"
    assert fedwon().facts.smallest_batch == 1
    for other in ("group_norm", "layer_norm", "no_norm"):
        with pytest.raises(JoinError, match="norm"):
            parse(f"fedwon + {other}")
    with pytest.raises(SharingError, match="no batch norm"):
        trained("fedbn + fedwon")


def test_the_slow_start_is_said_once_where_it_holds() -> None:
    said = [note for note in built("fedwon").notices if "starts slowly" in note]
    assert len(said) == 1
    assert "gamma=1.7139" in said[0]
    assert "\n" not in said[0]
    for other in ("fedwon(gamma=1.7139)", 'fedwon(init="keep")', "fedavg"):
        assert not any("starts slowly" in note for note in built(other).notices)


def test_at_the_start_the_last_hidden_layer_has_a_tenth_of_batch_norms_scale() -> None:
    data = data_sets.build("digits_mini(per_domain=20)")
    x = torch.cat([data.preparation.for_testing(domain.train.batch(slice(None))[0]) for domain in data.domains])

    def scale(method: str) -> float:
        torch.manual_seed(0)
        model = models.build("small_cnn", classes=10, input_shape=(3, 28, 28))
        for change in parse(method).surgery:
            model = change(model)
        seen: list[float] = []
        head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        head.register_forward_pre_hook(lambda _, given: seen.append(float(given[0].detach().square().mean().sqrt())))
        model.train()(x)
        return seen[0]

    assert 0.05 < scale("fedwon") / scale("fedavg") < 0.2
    assert scale("fedwon(gamma=1.7139)") / scale("fedavg") > 0.4
