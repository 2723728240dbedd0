"""FedStein: the James-Stein layer against numpy, its three variants, what travels, and identities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from polyfed.conversation import NEWCOMER
from polyfed.entries import entries_of
from polyfed.errors import JoinError, ModelError, OptionError
from polyfed.experiment import Experiment
from polyfed.layers.js_norm import JSBatchNorm, james_stein, james_stein_factor
from polyfed.layers.places import plain_batch_norm
from polyfed.method import Facts, Method, parse
from polyfed.result import Result
from polyfed.settings import Settings
from polyfed.sharing import bn_affine, keep_local
from polyfed.testing import SIZES, TinyNet, check_method, tiny_federation
from watching import messages

Array = np.ndarray[Any, Any]


def trained(method: str | Method, rounds: int = 3, model: nn.Module | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    settings = Settings(rounds=rounds, batch_size=4, lr=0.05, momentum=0.9, **changes)
    experiment = Experiment(settings, tiny_federation(), method, model or TinyNet())
    experiment.train()
    return experiment


def factor_by_hand(values: Array) -> float:
    """Written with r = |mean| / std of the entries, a form that shares no step with the code."""
    count, spread = len(values), float(np.std(values))
    if count <= 2 or spread == 0:
        return 1.0
    return 1 - ((count - 2) / count) / (1 + (float(np.mean(values)) / spread) ** 2)


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
    with pytest.raises(ModelError, match="more than one value per channel"):
        JSBatchNorm(5)(torch.zeros(1, 5))
    with pytest.raises(ModelError, match=r"\(N, C\)"):
        JSBatchNorm(5)(torch.zeros(5))
    with pytest.raises(ModelError, match="would be lost"):
        plain_batch_norm(BatchNormAct2d(4), "fedstein")


def test_every_batch_norm_of_a_resnet_is_taken_over_with_its_values() -> None:
    torch.manual_seed(0)
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)
    model(torch.rand(2, 3, 32, 32))
    model.bn1.weight.requires_grad_(False)
    model.bn1.eps = 1e-3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = {name: (entry.kind, entry.layer) for name, entry in entries_of(model).items()}
    operated = parse("fedstein").surgery[0](model)
    assert all(torch.equal(value, before[name]) for name, value in operated.state_dict().items())
    assert list(operated.state_dict()) == list(before)
    assert {name: (entry.kind, entry.layer) for name, entry in entries_of(operated).items()} == kinds
    assert sum(isinstance(m, JSBatchNorm) for m in operated.modules()) == 12
    assert operated.bn1.eps == 1e-3 and not operated.bn1.weight.requires_grad
    with pytest.raises(ModelError, match="no batch norm"):
        parse("fedstein").surgery[0](nn.Linear(2, 2))


def test_without_shrinkage_it_is_fedavg_with_the_affine_local() -> None:
    reference = Method("affine_local", sharing=(keep_local(bn_affine),), facts=Facts(batch_norm=True, client_state=True))
    expected = Result(trained(reference), []).digest
    for variant in ("jsnorm", "server", "eval_only"):
        assert Result(trained(f'fedstein(variant="{variant}", shrink=False)'), []).digest == expected
        if variant != "eval_only":
            assert Result(trained(f'fedstein(variant="{variant}")'), []).digest != expected


def test_eval_only_trains_as_without_shrinkage_and_evaluates_with_it() -> None:
    one, plain = trained('fedstein(variant="eval_only")'), trained("fedstein(shrink=False)")
    assert Result(one, []).digest == Result(plain, []).digest
    x = torch.rand(4, 3, 8, 8)
    for experiment in (one, plain):
        experiment.bench.load(experiment.server.state)
        experiment.bench.model.eval()
    assert not torch.allclose(one.bench.model(x), plain.bench.model(x), rtol=1e-3)


def test_the_server_variant_shrinks_the_average_and_nothing_else() -> None:
    model = TinyNet()
    with torch.no_grad():
        for name in ("stem.0.weight", "branch.0.weight"):
            model.get_parameter(name).mul_(torch.linspace(0.2, 6.0, 8).view(8, 1, 1, 1))
    literal, plain = (
        trained(text, rounds=1, model=model).server.state for text in ('fedstein(variant="server")', "fedstein(shrink=False)")
    )
    for name, value in plain.items():
        expected = value.numpy()
        if name.endswith(("running_mean", "running_var")):
            expected = expected * factor_by_hand(expected.astype(np.float64))
            assert not np.allclose(expected, value.numpy(), rtol=1e-3)
        np.testing.assert_allclose(literal[name].numpy(), expected, rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_server_variant_without_statistics_to_shrink_is_an_error() -> None:
    with pytest.raises(JoinError, match="would shrink nothing"):
        trained('fedstein(variant="server") + silobn')
    trained("fedstein + silobn", rounds=1)


def test_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    for text in ("fedstein", 'fedstein(variant="server")'):
        seen.clear()
        experiment = trained(text, rounds=2)
        affine = {f"{layer}.{key}" for layer in ("stem.1", "branch.1") for key in ("weight", "bias")}
        assert len(seen) == 6
        for ask, reply in seen:
            assert set(reply.entries) == set(ask.payloads[reply.client].entries) == set(TinyNet().state_dict()) - affine
        assert all(affine <= set(kept.entries) for kept in experiment.delivery.kept.values())
        experiment.evaluate()
        asked = {name for ask, reply in seen if ask.purpose == NEWCOMER for name in reply.entries}
        assert asked == affine


def test_a_newcomer_gets_the_affine_averaged_by_weight() -> None:
    experiment = trained("fedstein")
    state = experiment.newcomer_state()
    kept, total = experiment.delivery.kept, sum(SIZES.values())
    for name in ("stem.1.weight", "branch.1.bias"):
        mean = sum(SIZES[client] / total * kept[client].entries[name].double() for client in SIZES)
        torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-7)
    assert torch.equal(state["stem.1.running_mean"], experiment.server.state["stem.1.running_mean"])


@pytest.mark.parametrize(
    "text",
    ['fedstein(variant="server")', 'fedstein(variant="eval_only")', "fedstein(shrink=False)", 'fedstein + momentum(keep="local")'],
)
def test_variants_keep_the_contract(text: str) -> None:
    check_method(text)


def test_options_are_checked_and_clashes_named() -> None:
    with pytest.raises(OptionError, match="Did you mean jsnorm"):
        parse('fedstein(variant="jsnom")')
    with pytest.raises(JoinError, match="norm"):
        parse("fedstein + group_norm")
    assert str(parse('fedstein(variant="jsnorm")')) == "fedstein"


def test_re_estimated_newcomers_hold_raw_statistics() -> None:
    """The evaluation resets and re-fills buffers layer by layer; the James-Stein layer must follow that protocol."""
    experiment = trained("fedstein", rounds=1)
    rows = experiment.evaluate(newcomer="re-estimated")
    assert any(row.view == "unseen" and math.isfinite(row.numbers["accuracy"]) for row in rows)
