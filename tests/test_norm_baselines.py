"""Baselines that change or treat normalisation specially, and PartialFed: formulas, identities, and what travels."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from polyfed.client import Client, Kept
from polyfed.errors import JoinError, ModelError, OptionError, SharingError
from polyfed.experiment import Experiment
from polyfed.layers.swap import replace_modules
from polyfed.method import parse
from polyfed.methods.feddna import Importance, Moments
from polyfed.methods.partialfed_adaptive import LearnStrategy, Mixed, between, layers_of, temperature
from polyfed.models import models
from polyfed.result import Result
from polyfed.settings import Settings
from polyfed.testing import TinyNet, check_method, tiny_federation
from watching import watched

STATISTICS = {n for n in TinyNet().state_dict() if "running" in n or "num_batches" in n}


def built(method: str, model: nn.Module | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    return Experiment(Settings(method=method, **values), tiny_federation(), model=model or TinyNet())


def trained(method: str, model: nn.Module | None = None, **changes: Any) -> Experiment:
    experiment = built(method, model, **changes)
    experiment.train()
    return experiment


def digest_of(method: str, **changes: Any) -> str:
    return Result(trained(method, **changes), []).digest


def operated(model: nn.Module, text: str) -> nn.Module:
    for operate in parse(text).surgery:
        model = operate(model)
    return model


# --- weight_standard -----------------------------------------------------------------------------------------------------------------------


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
    other = trained("fedavg", model, momentum=0.9).server.state
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
        built("weight_standard", nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))
    with pytest.raises(ModelError, match="forward pass of its own"):
        built("weight_standard + fixup")
    constant = TinyNet()
    nn.init.zeros_(constant.branch[0].weight)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="no spread"):
        built("weight_standard", constant)
    with pytest.raises(JoinError, match="convolution"):
        parse("fedwon + weight_standard")


# --- static_bn -----------------------------------------------------------------------------------------------------------------------------


def test_static_bn_trains_the_weights_of_fedavg() -> None:
    static, plain = trained("static_bn", momentum=0.9).server.state, trained("fedavg", momentum=0.9).server.state
    assert all(torch.equal(static[name], value) for name, value in plain.items() if name not in STATISTICS)
    assert torch.equal(static["stem.1.running_mean"], torch.zeros(8))


def test_static_statistics_are_the_mean_over_all_batches_of_all_clients() -> None:
    experiment = trained("static_bn")
    experiment.evaluate()
    state = experiment.server.state
    model = TinyNet()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    seen = []
    for data in experiment.federation.clients:
        order = torch.randperm(len(data.train), generator=Client(data, experiment.bench, Kept(), 2).generator)
        cuts = {13: (4, 8), 8: (4,), 5: ()}[len(data.train)]
        for chunk in np.split(order.numpy(), cuts):
            x = experiment.bench.preparation.for_testing(data.train.batch(torch.tensor(chunk))[0])
            maps = model.stem[0](x).detach().double().numpy()
            seen.append((maps.mean((0, 2, 3)), maps.transpose(1, 0, 2, 3).reshape(8, -1).var(1, ddof=1)))
    assert len(seen) == 6 == int(state["stem.1.num_batches_tracked"])
    np.testing.assert_allclose(state["stem.1.running_mean"], np.mean([m for m, _ in seen], 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state["stem.1.running_var"], np.mean([v for _, v in seen], 0), rtol=1e-4, atol=1e-6)
    assert all(norm.momentum == 0.1 for norm in experiment.bench.batch_norms)


def test_static_statistics_go_up_only_for_evaluations_and_once_a_model() -> None:
    experiment = built("static_bn")
    seen = watched(experiment)
    everything = set(TinyNet().state_dict())
    assert seen[2, "train"] == (everything, everything - STATISTICS)
    experiment.evaluate()
    assert seen[2, "static_bn_statistics"] == (everything, STATISTICS)
    before = experiment.ledger.messages["evaluation"]
    rows = experiment.evaluate()
    assert experiment.ledger.messages["evaluation"] == before + 3 and len(rows) == 4
    experiment.server.state["head.weight"] = experiment.server.state["head.weight"] + 1
    experiment.evaluate()
    assert experiment.ledger.messages["evaluation"] == before + 3 + 6


@pytest.mark.parametrize(
    ("other", "why"), [("fixbn", "both decide"), ("fedbn", "both decide"), ('fedavg(statistics="drop")', "done already")]
)
def test_static_bn_alone_decides_over_statistics(other: str, why: str) -> None:
    with pytest.raises((JoinError, SharingError), match=why):
        built(f"static_bn + {other}")


# --- feddna --------------------------------------------------------------------------------------------------------------------------------

CLIENTS = [
    {"a.running_mean": [0.0, 1.0], "a.running_var": [1.0, 2.0]},
    {"a.running_mean": [0.5, 1.5], "a.running_var": [1.5, 1.0]},
    {"a.running_mean": [4.0, -3.0], "a.running_var": [0.2, 6.0]},
]
WEIGHTS = [5.0, 3.0, 2.0]


def kl(m: float, v: float, n: float, w: float) -> float:
    v, w = v + 1e-5, w + 1e-5
    return 0.5 * (math.log(w / v) + (v + (m - n) ** 2) / w - 1)


def by_hand(tau: float, iterations: int) -> dict[str, list[float]]:
    a = [w / sum(WEIGHTS) for w in WEIGHTS]
    merged: dict[str, list[float]] = {}
    for turn in range(iterations + 1):
        merged = {name: [sum(w * c[name][i] for w, c in zip(a, CLIENTS, strict=True)) for i in (0, 1)] for name in CLIENTS[0]}
        if turn < iterations:
            distances = []
            for c in CLIENTS:
                both = []
                for i in (0, 1):
                    own = (c["a.running_mean"][i], c["a.running_var"][i])
                    all_ = (merged["a.running_mean"][i], merged["a.running_var"][i])
                    both.append((kl(*own, *all_) + kl(*all_, *own)) / 2)
                distances.append(sum(both) / 2)
            raw = [math.exp(-d / tau) for d in distances]
            a = [r / sum(raw) for r in raw]
    return merged


@pytest.mark.parametrize(("tau", "iterations"), [(1.0, 3), (0.5, 1), (10.0, 2)])
def test_importance_weights_by_hand(tau: float, iterations: int) -> None:
    clients = [{name: torch.tensor(value) for name, value in client.items()} for client in CLIENTS]
    found = Importance(tau, iterations).combine(clients, WEIGHTS, {})
    for name, expected in by_hand(tau, iterations).items():
        assert found[name].tolist() == pytest.approx(expected, rel=1e-6)


def test_merged_moments_are_those_of_all_samples_together() -> None:
    generator = np.random.default_rng(0)
    samples = [generator.normal(k, 1 + k, (n, 2)) for k, n in enumerate((50, 30, 20))]
    clients = [{"a.running_mean": torch.tensor(s.mean(0)), "a.running_var": torch.tensor(s.var(0))} for s in samples]
    found = Moments().combine(clients, [50, 30, 20], {})
    union = np.concatenate(samples)
    np.testing.assert_allclose(found["a.running_mean"], union.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found["a.running_var"], union.var(0), rtol=1e-12)


def test_feddna_is_fedavg_but_for_statistics() -> None:
    assert digest_of("feddna(iterations=0)") == digest_of("fedavg")
    one, plain = trained("feddna", rounds=1).server.state, trained("fedavg", rounds=1).server.state
    differing = {name for name, value in plain.items() if not torch.equal(value, one[name])}
    assert differing == {name for name in STATISTICS if "running" in name}
    everything = set(plain)
    assert watched(built("feddna + agc(clip=1.28)"))[1, "train"] == (everything, everything)


# --- partialfed_fix ------------------------------------------------------------------------------------------------------------------------


def test_what_is_skipped_goes_up_and_never_comes_back() -> None:
    experiment = built("partialfed_fix")
    seen = watched(experiment)
    everything = set(TinyNet().state_dict())
    own = {name for name in everything if name.startswith(("stem.1.", "branch.1.", "head."))}
    assert len(own) == 12
    assert seen[1, "train"] == seen[2, "train"] == (everything - own, everything)
    kept = {client: k.entries for client, k in experiment.delivery.kept.items()}
    assert all(set(entries) == own for entries in kept.values())
    sizes = {"big": 13, "middle": 8, "small": 5}
    for name in ("head.weight", "stem.1.running_mean"):
        mean = sum(sizes[client] / 26 * kept[client][name] for client in sizes)
        torch.testing.assert_close(experiment.server.state[name], mean, rtol=1e-5, atol=1e-6)
    model = Result(experiment, []).model_for("small").state_dict()
    assert all(torch.equal(model[n], kept["small"][n] if n in own else experiment.server.state[n]) for n in everything)


def test_partialfed_fix_identities_and_options() -> None:
    assert digest_of("partialfed_fix(skip=())") == digest_of("fedavg")
    local = trained('partialfed_fix(skip=("batch_norm",))')
    fedbn = trained("fedbn")
    assert all(torch.equal(fedbn.server.state[n], local.server.state[n]) for n in ("stem.0.weight", "head.weight"))
    by_pattern = watched(built('partialfed_fix(skip=("branch.*", "head")) + agc'))[2, "train"][0]
    assert by_pattern == {name for name in TinyNet().state_dict() if name.startswith("stem.")}
    for text, why in {"('bn',)": "skip cannot name 'bn'", "'head'": "takes a list"}.items():
        with pytest.raises(OptionError, match=why):
            parse(f"partialfed_fix(skip={text})")
    with pytest.raises(SharingError, match="no batch norm"):
        built("partialfed_fix + group_norm(groups=2)")


# --- fixup ---------------------------------------------------------------------------------------------------------------------------------


def fixup_resnet20(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The forward pass of Fixup's ResNet-20, written out."""
    x = F.relu(F.conv2d(x, state["body.conv.weight"], padding=1) + state["body.bn.shift"])
    for stage in (1, 2, 3):
        for block in (1, 2, 3):
            own = {n.removeprefix(p): v for n, v in state.items() if n.startswith(p := f"body.stage{stage}_block{block}.")}
            stride = 2 if stage > 1 and block == 1 else 1
            out = F.conv2d(x + own["conv1.input_shift"], own["conv1.weight"], stride=stride, padding=1)
            out = F.relu(out + own["bn1.shift"])
            out = F.conv2d(out + own["conv2.input_shift"], own["conv2.weight"], padding=1)
            out = out * own["bn2.multiplier"] + own["bn2.shift"]
            if stride == 2:
                x = F.avg_pool2d(x, 1, 2)
                zeros = torch.zeros_like(x)[:, : x.shape[1] // 2]
                x = torch.cat([zeros, x, zeros], dim=1)
            x = F.relu(out + x)
    return F.linear(x.mean((2, 3)) + state["head.input_shift"], state["head.weight"], state["head.bias"])


def test_fixup_resnet20_starts_and_computes_as_defined() -> None:
    torch.manual_seed(0)
    plain = models.build("resnet20", classes=4, input_shape=(3, 16, 16))
    stem = plain.body.conv.weight.detach().clone()  # type: ignore[union-attr, operator]
    model = operated(plain, "fixup")
    state = model.state_dict()
    assert torch.equal(state["body.conv.weight"], stem) and not any("running" in name for name in state)
    scalars = {n: float(v) for n, v in state.items() if v.numel() == 1}
    assert len(scalars) == 9 * 5 + 2
    assert all(value == (1.0 if name.endswith("multiplier") else 0.0) for name, value in scalars.items())
    for name, value in state.items():
        if "conv2.weight" in name or name in ("head.weight", "head.bias"):
            assert not value.any()
        if "conv1.weight" in name:
            expected = math.sqrt(2 / (value.shape[0] * 9)) * 9**-0.5
            assert float(value.std()) == pytest.approx(expected, rel=0.06)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(x), fixup_resnet20(dict(model.named_parameters()), x), rtol=1e-4, atol=1e-5)


def test_fixup_on_torchvision_networks() -> None:
    torch.manual_seed(0)
    model = operated(torchvision.models.resnet50(num_classes=3), "fixup")
    blocks = [m for m in model.modules() if isinstance(m, torchvision.models.resnet.Bottleneck)]
    assert len(blocks) == 16 and not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert all(not b.conv3.weight.any() and torch.equal(b.bn3.multiplier, torch.ones(1)) for b in blocks)  # type: ignore[arg-type]
    expected = math.sqrt(2 / (512 * 9)) * 16**-0.25
    assert float(blocks[-1].conv2.weight.detach().std()) == pytest.approx(expected, rel=0.02)
    assert isinstance(blocks[0].downsample[1], nn.Identity)  # type: ignore[index]
    basic = operated(torchvision.models.resnet18(num_classes=3), "fixup")
    assert sum("shift" in n or "multiplier" in n for n, _ in basic.named_parameters()) == 8 * 5 + 3 + 2
    for other in (torchvision.models.vgg11_bn(), torchvision.models.squeezenet1_1()):
        with pytest.raises(ModelError, match="no residual branch"):
            operated(other, "fixup")


def test_fixup_without_slow_scalars_is_fedavg_on_the_same_network() -> None:
    experiment = built("fixup(scalar_lr=1.0)", momentum=0.9)
    same = copy.deepcopy(experiment.bench.model)
    names = set(same.state_dict())
    assert watched(experiment)[1, "train"] == (names, names)
    other = trained("fedavg", same, momentum=0.9)
    assert all(torch.equal(other.server.state[name], value) for name, value in experiment.server.state.items())


def test_scalars_learn_ten_times_slower() -> None:
    ends = {}
    for share in (0.1, 1.0):
        experiment = built(f"fixup(scalar_lr={share})", rounds=1, local_steps=1)
        # The head starts at zero, and so would the first gradients of what lies before it.
        experiment.server.state["head.weight"] = torch.linspace(-1, 1, 24).view(3, 8)
        experiment.train()
        ends[share] = experiment.server.state
    slow, fast = ends[0.1], ends[1.0]
    assert bool(fast["head.input_shift"].abs() > 1e-4)
    for name in ("head.input_shift", "stem.1.shift", "branch.1.shift"):
        torch.testing.assert_close(slow[name], 0.1 * fast[name], rtol=1e-3, atol=1e-7)
    assert torch.equal(slow["head.weight"], fast["head.weight"])
    with pytest.raises(OptionError, match="Use --optimizer sgd"):
        built("fixup", optimizer="adam")


# --- partialfed_adaptive -------------------------------------------------------------------------------------------------------------------


def test_an_adaptive_strategy_of_never_is_fedavg() -> None:
    assert digest_of("partialfed_adaptive(share=0)") == digest_of("fedavg")
    # In the first round nobody has a model of its own: everything is loaded.
    first, plain = trained("partialfed_adaptive", rounds=1), trained("fedavg", rounds=1)
    assert all(torch.equal(first.server.state[name], value) for name, value in plain.server.state.items())
    assert digest_of("partialfed_adaptive", rounds=3) != digest_of("fedavg", rounds=3)


def test_the_strategy_chooses_layers_in_training_and_in_evaluation() -> None:
    experiment = built("partialfed_adaptive")
    data = experiment.federation.clients[0]
    own = {name: value + 1 for name, value in experiment.server.state.items()}
    client = Client(data, experiment.bench, Kept(own), 2)
    layers = layers_of(client)
    assert layers == ["stem.0", "stem.1", "branch.0", "branch.1", "head"]
    client.memory["partialfed_logits"] = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.0, 0.1], [0.0, -1.0]])
    client.receive(experiment.server.outgoing(client.id))
    for name, value in experiment.bench.live.items():
        mine = name.startswith(("stem.1.", "branch.1."))
        assert torch.equal(value, own[name] if mine else experiment.server.state[name]), name


LAYERS = ("stem.0", "stem.1", "branch.0", "branch.1", "head")


def with_own_model(
    experiment: Experiment, memory: dict[str, Any] | None = None
) -> tuple[Client, dict[str, Tensor], dict[str, Tensor]]:
    """A client in round 2 that has received; what was sent, and its own last values."""
    data = experiment.federation.clients[0]
    sent = dict(experiment.server.outgoing(data.id))
    own = {n: v + 0.1 * torch.randn(v.shape) if v.is_floating_point() else v + 7 for n, v in sent.items()}
    client = Client(data, experiment.bench, Kept(own, memory or {}), 2)
    client.receive(sent)
    client.model.train()
    return client, sent, own


def mixed_by_hand(sent: dict[str, Tensor], own: dict[str, Tensor], weights: Any) -> dict[str, Any]:
    """Plain arithmetic, number by number of the state, for real entries."""
    share = dict(zip(LAYERS, weights, strict=True))
    floats = {name: share[name.rpartition(".")[0]] for name, value in sent.items() if value.is_floating_point()}
    return {name: z * sent[name].double().numpy() + (1 - z) * own[name].double().numpy() for name, z in floats.items()}


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (0, 0, 0, 0, 0), (0.25, 1, 0.9, 0, 0.5)])
def test_weight_one_is_what_was_sent_and_zero_the_clients_own(weights: tuple[float, ...]) -> None:
    client, sent, own = with_own_model(built("partialfed_adaptive"))
    found = between(client, sent, own, torch.tensor(weights, dtype=torch.float32))
    assert set(found) == set(sent)
    for name, expected in mixed_by_hand(sent, own, weights).items():
        np.testing.assert_allclose(found[name].numpy(), expected, rtol=1e-5, atol=1e-6)
        z = weights[LAYERS.index(name.rpartition(".")[0])]
        assert z not in (0, 1) or torch.equal(found[name], sent[name] if z else own[name])
    assert all(torch.equal(found[name], client.bench.live[name]) for name in found if "num_batches" in name)


def test_the_temperature_falls_evenly_from_the_first_round_to_the_last() -> None:
    def at(number: int, rounds: int) -> float:
        experiment = built("partialfed_adaptive", rounds=rounds)
        return temperature(Client(experiment.federation.clients[0], experiment.bench, Kept(), number))

    assert [at(number, 4) for number in (1, 2, 3, 4)] == pytest.approx([1.0, 0.7, 0.4, 0.1])
    assert at(1, 1) == 1.0


@pytest.mark.parametrize(
    ("share", "changes", "steps"),
    [
        (1.0, {}, 2),  # of 8 images in batches of 4
        (0.1, {}, 1),
        (0.7, {"batch_size": 3}, 2),
        (0.5, {"local_epochs": 3}, 3),
        (0.3, {"local_steps": 11}, 3),
    ],
)
def test_the_strategy_takes_its_share_of_the_steps(share: float, changes: dict[str, Any], steps: int) -> None:
    experiment = built("partialfed_adaptive", **changes)
    client = Client(experiment.federation.clients[1], experiment.bench, Kept(), 2)
    assert LearnStrategy(share, 0.1).steps(client) == steps


def test_one_step_of_the_logits_by_hand() -> None:
    """Gumbel noise, softmax, straight-through and chain rule in numpy; torch gives the gradient of an ordinary model only."""
    experiment = built("partialfed_adaptive", rounds=3)
    before = np.array([[0.3, -0.2], [0.0, 0.4], [0.1, 0.1], [-0.5, 0.2], [0.6, 0.5]])
    client, sent, own = with_own_model(experiment, {"partialfed_logits": torch.tensor(before, dtype=torch.float32)})
    x, y = next(Client(client.data, experiment.bench, Kept(), 2).batches())
    torch.manual_seed(11)
    noise = -np.log(torch.empty(5, 2).exponential_().double().numpy())
    odds = np.exp((before + noise) / 0.55)  # round 2 of 3: 1 - 0.9 / 2
    soft = odds / odds.sum(axis=1, keepdims=True)
    z = (soft[:, 0] > soft[:, 1]).astype(float)
    assert 0 < z.sum() < 5
    model = copy.deepcopy(client.model).train()
    model.load_state_dict({**sent, **{n: torch.tensor(v, dtype=torch.float32) for n, v in mixed_by_hand(sent, own, z).items()}})
    F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    slope = dict.fromkeys(LAYERS, 0.0)
    for name, parameter in model.named_parameters():
        slope[name.rpartition(".")[0]] += float((parameter.grad * (sent[name] - own[name])).sum())  # type: ignore[operator]
    away = soft[:, 0] * soft[:, 1] / 0.55 * np.array([slope[layer] for layer in LAYERS])
    expected = before - 2.0 * np.stack((away, -away), axis=1)
    torch.manual_seed(11)
    LearnStrategy(0.1, 2.0)(client)
    np.testing.assert_allclose(client.memory["partialfed_logits"].numpy(), expected, rtol=1e-4, atol=1e-6)
    assert np.abs(expected - before).max() > 0.01
    for name, value in client.bench.live.items():
        load, keep = expected[LAYERS.index(name.rpartition(".")[0])]
        assert torch.equal(value, sent[name] if load >= keep else own[name]), name


def test_gradients_of_the_strategy_are_those_of_the_mixing_weights() -> None:
    experiment = built("partialfed_adaptive")
    client, sent, own = with_own_model(experiment)
    data = client.data
    assert isinstance(client.received, Mixed) and client.received.sent is sent
    z = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], requires_grad=True)
    x, y = data.train.batch(slice(0, 6))
    x = experiment.bench.preparation.for_testing(x)

    def loss(weights: Tensor) -> Tensor:
        model = client.model.train()
        return F.cross_entropy(torch.func.functional_call(model, between(client, sent, own, weights), (x,)), y)

    (gradient,) = torch.autograd.grad(loss(z), z)
    step = 1e-2
    for index in range(5):
        shift = step * F.one_hot(torch.tensor(index), 5)
        slope = float(loss(z.detach() + shift) - loss(z.detach() - shift)) / (2 * step)
        assert float(gradient[index]) == pytest.approx(slope, rel=0.05, abs=2e-4)


def test_adaptive_shares_everything_and_keeps_model_and_strategy() -> None:
    experiment = built("partialfed_adaptive", rounds=3)
    everything = set(TinyNet().state_dict())
    assert watched(experiment)[3, "train"] == (everything, everything)
    for kept in experiment.delivery.kept.values():
        assert set(kept.entries) == everything and kept.memory["partialfed_logits"].shape == (5, 2)
        assert bool(kept.memory["partialfed_logits"].any())
    assert experiment.ledger.bytes["up"]["training"].get("extra", 0) == 0
    assert {row.client for row in experiment.evaluate() if row.view == "seen"} == {"big", "middle", "small"}


@pytest.mark.parametrize(
    "text",
    [
        "group_norm(groups=2) + weight_standard",
        "static_bn + agc(clip=1.28)",
        'feddna(merge="moments")',
        'partialfed_fix(skip=("head",)) + fedbn + agc(clip=1.28)',
        "fixup + agc(clip=1.28)",
        "fedbn + partialfed_adaptive + agc(clip=1.28)",
    ],
)
def test_joined_they_keep_the_contract(text: str) -> None:
    check_method(text)


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
