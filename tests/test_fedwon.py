"""FedWon: the layer against numbers worked out another way, the surgery on real models, folding, identities."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.layers import BatchNormAct2d, Conv2dSame, ScaledStdConv2d
from torch import Tensor, nn

from polyfed.entries import entries_of
from polyfed.errors import JoinError, ModelError, OptionError, SharingError
from polyfed.experiment import Experiment
from polyfed.layers.norms import InstanceNorm
from polyfed.layers.ws_conv import WSConv1d, WSConv2d, WSConv3d
from polyfed.method import parse
from polyfed.methods.fedwon import fedwon, fold, is_norm
from polyfed.models import models
from polyfed.result import Result
from polyfed.settings import Settings
from polyfed.testing import TinyNet, check_method, tiny_federation


def operated(model: nn.Module, text: str = "fedwon") -> nn.Module:
    for operate in parse(text).surgery:
        model = operate(model)
    return model


def trained(method: str, model: nn.Module | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    experiment = Experiment(Settings(method=method, **values), tiny_federation(), model=model or TinyNet())
    experiment.train()
    return experiment


def listing_by_hand(weight: np.ndarray[Any, Any], gain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Filter by filter, number by number."""
    out = np.empty_like(weight)
    for index, row in enumerate(weight.reshape(len(weight), -1)):
        n = len(row)
        mean = math.fsum(row) / n
        variance = math.fsum((value - mean) ** 2 for value in row) / (n - 1)
        scale = 1 / math.sqrt(max(variance * n, 1e-4))
        out[index] = (weight[index] - mean) * scale * gain[index]
    return out


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


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


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


@pytest.mark.parametrize(
    "text", ['fedwon(bias="of")', 'fedwon(init="keeep")', "fedwon(gamma=0.0)", 'fedwon(plain="stem.0")', 'fedwon(norms="none")']
)
def test_wrong_options_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="fedwon"):
        parse(text)


def test_kept_weights_need_the_gain() -> None:
    with pytest.raises(OptionError, match="learnt gain"):
        parse('fedwon(init="keep", form="equation")')


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
        (Winding, "cannot be traced"),
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
    assert Result(trained("fedavg", start), []).digest == Result(experiment, []).digest


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


@pytest.mark.parametrize(
    "text",
    [
        "fedwon + agc(clip=0.64)",
        'fedwon(bias="keep", form="equation", gamma=1.7139)',
        'fedwon(init="keep", plain=("stem.*",))',
    ],
)
def test_variants_keep_the_contract(text: str) -> None:
    check_method(text)


def test_what_it_joins_with() -> None:
    assert str(parse("fedwon + agc(clip=0.64)")) == "fedwon + agc(clip=0.64)"
    assert str(parse("fedavg + fedwon")) == "fedwon"
    assert fedwon().facts.smallest_batch == 1
    for other in ("group_norm", "layer_norm", "no_norm"):
        with pytest.raises(JoinError, match="norm"):
            parse(f"fedwon + {other}")
    with pytest.raises(SharingError, match="no batch norm"):
        trained("fedbn + fedwon")
