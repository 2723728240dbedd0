"""Domain-generalisation baselines: FedGMA, FedDG-GA, RSC, MixStyle, IBN, DSON and FedSR, by hand, by identity, and by what travels."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.client import Client, Kept
from polyfed.errors import DataError, JoinError, ModelError, OptionError, TooFewReplies
from polyfed.experiment import Experiment
from polyfed.method import Method, parse
from polyfed.methods import feddg_ga, fedsr, mixstyle
from polyfed.methods.dson import DSON
from polyfed.methods.fedgma import MaskedMean
from polyfed.methods.ibn import IBN, ToIBN
from polyfed.methods.rsc import challenge
from polyfed.reducers import Mean
from polyfed.result import Result
from polyfed.server import Server
from polyfed.settings import Settings
from polyfed.testing import SIZES, TinyNet, check_method, tiny_federation
from watching import messages


def trained(method: str | Method, federation: Any = None, model: nn.Module | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    experiment = Experiment(Settings(**values), federation or tiny_federation(), method, model or TinyNet())
    experiment.train()
    return experiment


def digest_of(method: str, **changes: Any) -> str:
    return Result(trained(method, **changes), []).digest


def batch_of(experiment: Experiment, count: int = 5) -> tuple[Client, Tensor, Tensor]:
    client = Client(experiment.federation.clients[0], experiment.bench, Kept(), 1)
    x, y = client.data.train.batch(slice(0, count))
    return client, experiment.bench.preparation.for_testing(x), y


def used_norm(channels: int = 6) -> nn.BatchNorm2d:
    """A batch norm as a pretrained network has it."""
    norm = nn.BatchNorm2d(channels)
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.copy_(torch.rand(channels, generator=stream) + 0.5)
    return norm


# --- neutral settings


def test_neutral_settings_are_fedavg_to_the_bit() -> None:
    plain = digest_of("fedavg")
    neutral = ["fedgma(tau=0.0)", 'fedgma(server_lr=0.0, variant="average_plus_step")', "rsc(features=0.0)", "rsc(batch=0.0)"]
    for text in (*neutral, "mixstyle(p=0.0)"):
        assert digest_of(text) == plain, text
    for text in ("fedgma", "rsc", "mixstyle"):
        assert digest_of(text) != plain, text
    assert digest_of("feddg_ga(step=0.0)") == digest_of("fedavg", weights="uniform") != plain


@pytest.mark.parametrize(
    "text",
    [
        "fedbn + fedgma(tau=0.3) + agc",
        'fedgma(tau=0.5, server_lr=0.1, variant="average_plus_step")',
        'feddg_ga(center=False, metric="accuracy") + fedbn',
        "fedbn + rsc + mixstyle(p=1.0)",
        "fedbn + ibn + guiding + agc",
        'fixbn + dson(exact=False) + mixstyle(p=1.0, after="branch")',
        "dson(domain_specific=True) + guiding",
        "fedbn + fedsr(width=5, squared=True) + mixstyle",
        'fedsr + rsc + guiding + momentum(keep="local")',
    ],
)
def test_joined_they_keep_the_contract(text: str) -> None:
    check_method(text)


def test_parts_and_methods_are_written_as_such() -> None:
    assert str(parse("rsc")) == "fedavg + rsc"
    assert str(parse("mixstyle")) == "fedavg + mixstyle"
    assert str(parse("ibn + guiding")) == "fedavg + guiding(weight=0.5) + ibn"
    assert str(parse("fedgma")) == "fedgma(tau=0.7)"
    assert str(parse("feddg_ga")) == "feddg_ga(step=0.2)"
    with pytest.raises(JoinError, match="norm"):
        parse("ibn + dson")
    with pytest.raises(JoinError, match="norm"):
        parse("ibn + group_norm")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fedgma(tau=1.5)", "tau lies between"),
        ("fedgma(server_lr=-1.0)", "server_lr must not"),
        ('fedgma(variant="masked")', "masked_delta"),
        ("feddg_ga(step=2.0)", "step lies between"),
        ('feddg_ga(metric="auc")', "metric cannot be"),
        ("rsc(features=1.0)", "features lies between"),
        ("mixstyle(p=1.5)", "p lies between"),
        ("mixstyle(alpha=0.0)", "alpha must be positive"),
        ("mixstyle(after=())", "after takes auto"),
        ("ibn(where=())", "where takes all"),
        ("fedsr(samples=0)", "samples at least 1"),
    ],
)
def test_wrong_options_are_refused(text: str, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        parse(text)


# --- FedGMA


@pytest.mark.parametrize("variant", ["masked_delta", "average_plus_step"])
def test_fedgma_by_hand(variant: str) -> None:
    start = np.array([1.0, 0.0, 2.0, -1.0], dtype=np.float32)
    clients = np.array([[2, 1, 3, -1], [3, -1, 1, -1], [1.5, 4, 1, -2]], dtype=np.float32)
    weights = np.array([5.0, 3.0, 2.0])
    folding = MaskedMean(0.6, 0.5, variant).start({"w": torch.tensor(start)})
    for values, weight in zip(clients, weights, strict=True):
        folding.add({"w": torch.tensor(values), "count": torch.tensor(int(weight))}, float(weight))
    update = (weights[:, None] * (clients - start)).sum(0) / 10
    # Signs: +++ (1), +-+ (1/3), +-- (1/3), 00- (1/3); only the first reaches 0.6.
    mask = np.array([1, 1 / 3, 1 / 3, 1 / 3])
    step = 0.5 * mask * update
    expected = start + step if variant == "masked_delta" else start + update + step
    found = folding.finish()
    np.testing.assert_allclose(found["w"].numpy(), expected, rtol=1e-5)
    assert int(found["count"]) == 5


def test_fedgma_with_unanimous_signs_is_the_mean_to_the_bit() -> None:
    stream = torch.Generator().manual_seed(1)
    start = torch.randn(50, generator=stream)
    clients = [start + torch.rand(50, generator=stream) + 0.1 for _ in range(3)]
    masked = MaskedMean(0.9, 1.0, "masked_delta").start({"w": start})
    for number, client in enumerate(clients):
        masked.add({"w": client}, number + 1.0)
    plain = Mean().start({})
    for number, client in enumerate(clients):
        plain.add({"w": client}, number + 1.0)
    assert torch.equal(masked.finish()["w"], plain.finish()["w"])


def test_fedgma_masks_parameters_only_and_one_client_is_fedavg() -> None:
    masked, plain = trained("fedgma(tau=1.0)", rounds=1), trained("fedavg", rounds=1)
    same = {name for name, value in masked.server.state.items() if torch.equal(value, plain.server.state[name])}
    assert {name for name in masked.server.state if "running" in name or "num_batches" in name} <= same
    assert not same & {"stem.0.weight", "branch.0.weight", "head.weight"}
    alone = {"only": 12}
    one = trained("fedgma(tau=1.0)", tiny_federation(alone))
    assert torch.equal(one.server.state["stem.0.weight"], trained("fedavg", tiny_federation(alone)).server.state["stem.0.weight"])
    assert all(travel.words == "shared" for travel in masked.bench.plan.at(1).travels.values())


# --- FedDG-GA


def test_feddg_ga_weights_by_hand() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    gaps = {"a": 0.1, "b": 0.4, "c": -0.2}
    # Centred: 0, 0.3, -0.3; over 0.3: 0, 1, -1; times 0.6/3.
    assert feddg_ga.adjusted(weights, gaps, 0.6, True) == pytest.approx({"a": 0.5, "b": 0.5, "c": 0.0})
    plain = np.clip(np.array([0.5, 0.3, 0.2]) + 0.2 * np.array([0.1, 0.4, -0.2]) / 0.4, 0, 1)
    assert list(feddg_ga.adjusted(weights, gaps, 0.6, False).values()) == pytest.approx(list(plain / plain.sum()))


def test_feddg_ga_weights_stay_on_the_simplex_and_equal_gaps_change_nothing() -> None:
    stream = np.random.default_rng(0)
    for _ in range(50):
        weights = dict(zip("abcd", stream.dirichlet(np.ones(4) * 0.3), strict=True))
        gaps = dict(zip("abcd", stream.normal(size=4), strict=True))
        new = feddg_ga.adjusted(weights, gaps, 1.0, bool(stream.integers(2)))
        assert sum(new.values()) == pytest.approx(1) and all(0 <= value <= 1 for value in new.values())
        assert feddg_ga.adjusted(weights, dict.fromkeys("abcd", gaps["a"]), 1.0, True) == weights
    assert feddg_ga.adjusted({"a": 0.7, "b": 0.3}, {"a": 0.0, "b": 0.0}, 1.0, False) == {"a": 0.7, "b": 0.3}
    assert feddg_ga.adjusted({"a": 0.7, "b": 0.3}, {}, 1.0, True) == {"a": 0.7, "b": 0.3}


def test_feddg_ga_pairs_a_round_with_the_model_it_was_averaged_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    experiment = trained("feddg_ga(step=0.9)", rounds=3)
    told = {(ask.round, reply.client): reply.extras for ask, reply in seen}
    assert all(set(extras) == {feddg_ga.BEFORE, feddg_ga.AFTER} for extras in told.values()) and len(told) == 9
    weights = dict.fromkeys(SIZES, 1 / 3)
    for number in (2, 3):
        gaps = {c: told[number, c][feddg_ga.BEFORE] - told[number - 1, c][feddg_ga.AFTER] for c in SIZES}
        weights = feddg_ga.adjusted(weights, gaps, 0.9 * (1 - (number - 2) / 3), True)
    entries = {reply.client: reply.entries["head.weight"].double() for ask, reply in seen if ask.round == 3}
    mean = sum(weights[c] * entries[c] for c in SIZES)
    torch.testing.assert_close(experiment.server.state["head.weight"].double(), mean, rtol=1e-5, atol=1e-7)
    assert experiment.server.memory["feddg_ga"]["weights"] == pytest.approx(weights)
    assert max(weights.values()) - min(weights.values()) > 0.1


def test_feddg_ga_repeats_a_round_from_the_weights_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("feddg_ga(step=0.9)", rounds=3).server
    absorb, failed = Server.absorb, []

    def failing_once(server: Server, replies: Any) -> None:
        if server.round == 2 and not failed:
            failed.append(dict(server.memory["feddg_ga"]["round"]))
            raise TooFewReplies("nobody answered")
        absorb(server, replies)

    monkeypatch.setattr(Server, "absorb", failing_once)
    repeated = trained("feddg_ga(step=0.9)", rounds=3).server
    assert failed == [dict.fromkeys(SIZES, 2)] and repeated.attempt == whole.attempt == 0
    assert repeated.memory["feddg_ga"] == whole.memory["feddg_ga"]


def test_feddg_ga_scores_validation_data_and_leaves_modes_alone() -> None:
    experiment = trained("feddg_ga", rounds=1)
    client, _, _ = batch_of(experiment)
    model = experiment.bench.model.train()
    model.stem[1].eval()  # type: ignore[index, union-attr]
    held = client.data.validation
    assert held is not None
    x, y = held.batch(slice(0, len(held)))
    found = feddg_ga.badness(client, "loss"), feddg_ga.badness(client, "accuracy")
    assert model.training and not model.stem[1].training and model.branch[1].training  # type: ignore[index, union-attr]
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(experiment.bench.preparation.for_testing(x))
    assert found[0] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    assert found[1] == pytest.approx(float((logits.argmax(1) != y).float().mean()))
    bare = tiny_federation()
    for item in bare.clients:
        object.__setattr__(item, "validation", None)
    with pytest.raises(DataError, match="feddg_ga needs"):
        trained("feddg_ga", bare)


# --- RSC


def test_rsc_mask_against_numpy() -> None:
    stream = torch.Generator().manual_seed(2)
    head = nn.Linear(9, 4)
    z, y = torch.randn(7, 9, generator=stream), torch.randint(4, (7,), generator=stream)
    w, b = head.weight.detach().numpy(), head.bias.detach().numpy()
    # The gradient of a linear head's logit y is the row y of its weight.
    gradient = w[y.numpy()]
    kept = gradient < np.percentile(gradient, 100 * (1 - 1 / 3), axis=1, keepdims=True)

    def chosen(features: Any) -> Any:
        logits = features @ w.T + b
        odds = np.exp(logits - logits.max(1, keepdims=True))
        return (odds / odds.sum(1, keepdims=True))[np.arange(7), y.numpy()]

    change = chosen(z.numpy()) - chosen(z.numpy() * kept)
    expected = kept | (change < np.percentile(change, 100 * (1 - 1 / 3)))[:, None]
    found = challenge(head, z, y, 1 / 3, 1 / 3)
    np.testing.assert_array_equal(found.numpy().astype(bool), expected)
    assert head.weight.grad is None and 0 < expected.sum() < expected.size


def test_rsc_loss_is_taken_on_masked_features_and_reaches_the_network() -> None:
    experiment = trained("rsc", rounds=1)
    client, x, y = batch_of(experiment)
    twin = copy.deepcopy(experiment.bench.model).train()
    experiment.bench.model.train()
    step = client.forward(0, x, y)
    stem = twin.stem(x)  # type: ignore[operator]
    z = torch.relu(stem + twin.branch(stem)).mean(dim=(2, 3))  # type: ignore[operator]
    mask = challenge(twin.head, z, y, 1 / 3, 1 / 3)  # type: ignore[arg-type]
    by_hand = F.cross_entropy(twin.head(z * mask), y)  # type: ignore[operator]
    torch.testing.assert_close(step.task_loss, by_hand)
    experiment.bench.model.zero_grad()
    step.task_loss.backward()  # type: ignore[no-untyped-call]
    (expected,) = torch.autograd.grad(by_hand, [twin.get_parameter("stem.0.weight")])
    torch.testing.assert_close(experiment.bench.parameters["stem.0.weight"].grad, expected, rtol=1e-4, atol=1e-6)
    assert int(experiment.bench.live["stem.1.num_batches_tracked"]) == int(twin.stem[1].num_batches_tracked)  # type: ignore[index, union-attr]


def test_rsc_needs_to_know_the_head() -> None:
    class Doubtful(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with pytest.raises(ModelError, match=r"rsc needs the model's head.*--head"):
        trained("rsc", model=Doubtful())


# --- MixStyle


def test_mixstyle_against_numpy_and_its_styles() -> None:
    stream = torch.Generator().manual_seed(4)
    x = torch.randn(5, 3, 4, 4, generator=stream) * 2 + 1
    share, partner = torch.rand(5, generator=stream), torch.randperm(5, generator=stream)
    a, lam = x.double().numpy(), share.double().numpy()[:, None, None, None]
    mean, spread = a.mean((2, 3), keepdims=True), np.sqrt(a.var((2, 3), ddof=1, keepdims=True) + 1e-6)
    order = partner.numpy()
    expected = (a - mean) / spread * (lam * spread + (1 - lam) * spread[order]) + lam * mean + (1 - lam) * mean[order]
    np.testing.assert_allclose(mixstyle.mixed(x, share, partner).numpy(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixstyle.mixed(x, torch.ones(5), partner), x, rtol=1e-5, atol=1e-5)
    borrowed = mixstyle.mixed(x, torch.zeros(5), partner)
    torch.testing.assert_close(borrowed.mean((2, 3)), x[partner].mean((2, 3)), rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="no spread over positions"):
        mixstyle.mixed(torch.zeros(4, 3, 1, 1), torch.ones(4), torch.arange(4))


def test_mixstyle_without_gradient_through_styles() -> None:
    x = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([1, 2, 3, 0])
    mixstyle.mixed(x, torch.zeros(4, dtype=torch.float64), order).sum().backward()  # type: ignore[no-untyped-call]
    spread = (x.detach().var((2, 3), keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(x.grad, (spread[order] / spread).expand_as(x))


def test_mixstyle_places_names_and_modes() -> None:
    resnet = torchvision.models.resnet18(num_classes=3)
    assert mixstyle.places(resnet, "auto") == ["layer1", "layer2", "layer3"]
    assert mixstyle.places(resnet, ("layer1", "layer2")) == ["layer1", "layer2"]
    assert mixstyle.places(resnet, "layer?.0") == ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]
    assert mixstyle.places(TinyNet(), "auto") == ["stem.2"]
    with pytest.raises(ModelError, match="Did you mean layer1"):
        mixstyle.places(resnet, "layr1")
    with pytest.raises(ModelError, match="no convolution"):
        mixstyle.places(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), "auto")
    names = list(TinyNet().state_dict())
    model = copy.deepcopy(mixstyle.InsertMixStyle("auto", 1.0, 0.1)(TinyNet()))
    assert list(model.state_dict()) == names
    x = torch.randn(6, 3, 8, 8)
    model.eval()
    before = torch.get_rng_state()
    assert torch.equal(model(x), model(x)) and torch.equal(before, torch.get_rng_state())
    model.train()
    assert not torch.equal(model(x), model(x))


def test_mixstyle_is_applied_as_often_as_it_says() -> None:
    torch.manual_seed(0)
    model = nn.Module().train()
    hook = mixstyle.MixAfter(model, 0.3, 0.1)
    times = sum(hook(model, (), torch.randn(2, 1, 2, 2)) is not None for _ in range(1000))
    assert 250 < times < 350


# --- IBN


@pytest.mark.parametrize("training", [True, False])
def test_ibn_halves_are_torchs_own_norms(training: bool) -> None:
    norm, x = used_norm(7).train(training), torch.randn(5, 7, 4, 4)
    layer = IBN(norm)
    instance = F.instance_norm(x[:, :3], weight=norm.weight[:3], bias=norm.bias[:3])
    whole = norm(x)
    torch.testing.assert_close(layer(x), torch.cat((instance, whole[:, 3:]), 1), rtol=1e-5, atol=1e-5)
    assert norm.running_mean is not None
    torch.testing.assert_close(layer.batch_half.running_mean, norm.running_mean[3:])


def split_at(model: nn.Module, where: str | tuple[str, ...] = "auto") -> list[str]:
    made = ToIBN(where)(model)
    return [path for path, module in made.named_modules() if isinstance(module, IBN)]


def test_ibn_places() -> None:
    blocks = [f"layer{stage}.{block}.bn1" for stage in (1, 2, 3) for block in (0, 1)]
    assert split_at(torchvision.models.resnet18(num_classes=3)) == blocks
    counts = {1: 3, 2: 4, 3: 6}
    deep = [f"layer{stage}.{block}.bn1" for stage, count in counts.items() for block in range(count)]
    assert split_at(torchvision.models.resnet50(num_classes=3)) == deep
    assert split_at(TinyNet()) == ["stem.1"]
    assert split_at(TinyNet(), "branch.*") == ["branch.1"]
    assert split_at(TinyNet(), "all") == ["stem.1", "branch.1"]
    with pytest.raises(ModelError, match="no batch norm of maps"):
        ToIBN("auto")(nn.Sequential(nn.Linear(2, 2)))


def test_ibn_travels_whole_and_its_batch_half_is_batch_norm_to_fedbn() -> None:
    shared = trained("ibn", rounds=1).bench.plan.at(1)
    assert all(travel.words == "shared" for travel in shared.travels.values())
    personal = trained("fedbn + ibn", rounds=1).bench.plan.at(1).travels
    assert personal["stem.1.batch_half.weight"].words == "local"
    assert personal["stem.1.instance_half.weight"].words == "shared"


# --- DSON


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_dson_against_numpy(exact: bool, training: bool) -> None:
    norm, x = used_norm(3).train(training), torch.randn(4, 3, 5, 2) * 2 + 1
    layer = DSON(norm, 0.4, exact)
    a, w = x.double().numpy(), 1 / (1 + np.exp(-0.4))
    running = [value.double().numpy().reshape(1, 3, 1, 1) for value in (norm.running_mean, norm.running_var)]  # type: ignore[union-attr]
    mean, variance = (a.mean((0, 2, 3), keepdims=True), a.var((0, 2, 3), keepdims=True)) if training else running
    own_mean, own_variance = a.mean((2, 3), keepdims=True), a.var((2, 3), keepdims=True)
    mu = w * mean + (1 - w) * own_mean
    sigma2 = w * variance + (1 - w) * own_variance + (w * (1 - w) * (mean - own_mean) ** 2 if exact else 0)
    scale, shift = (value.detach().double().numpy().reshape(1, 3, 1, 1) for value in (norm.weight, norm.bias))
    expected = (a - mu) / np.sqrt(sigma2 + 1e-5) * scale + shift
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    norm(x)
    torch.testing.assert_close(layer.running_mean, norm.running_mean)
    torch.testing.assert_close(layer.running_var, norm.running_var)


def test_dson_with_batch_statistics_only_is_fedavg() -> None:
    ours, plain = trained("dson(score=10000.0)", momentum=0.9), trained("fedavg", momentum=0.9)
    for name, value in plain.server.state.items():
        torch.testing.assert_close(ours.server.state[name], value, rtol=0, atol=1e-5)
    assert float(ours.server.state["stem.1.score"]) == 10000.0


def test_dson_travels_whole_or_stays_with_the_domain() -> None:
    experiment = trained("dson", rounds=1)
    assert all(travel.words == "shared" for travel in experiment.bench.plan.at(1).travels.values())
    assert float(experiment.server.state["stem.1.score"].abs()) > 0
    own = trained("dson(domain_specific=True)", rounds=1)
    local = {name for name, travel in own.bench.plan.at(1).travels.items() if travel.words == "local"}
    assert local == {name for name in own.server.state if name.startswith(("stem.1.", "branch.1."))}
    assert {"stem.1.score", "stem.1.running_mean", "stem.1.weight"} <= local
    assert [row.domain for row in own.evaluate(newcomer="ensemble") if row.view == "unseen"] == ["new"]
    with pytest.raises(ModelError, match="no batch norm of maps"):
        trained("dson", model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))


# --- FedSR


def test_fedsr_divergence_is_torchs() -> None:
    stream = torch.Generator().manual_seed(5)
    m, s, rm, rs = (torch.rand(6, 4, generator=stream) + 0.2 for _ in range(4))
    expected = torch.distributions.kl_divergence(torch.distributions.Normal(m, s), torch.distributions.Normal(rm, rs)).sum(1)
    torch.testing.assert_close(fedsr.divergence(m, s, rm, rs), expected)


@pytest.mark.parametrize("squared", [False, True])
def test_fedsr_terms_by_hand(squared: bool) -> None:
    experiment = trained(f"fedsr(l2r=0.3, cmi=0.2, squared={squared})", rounds=1)
    client, x, y = batch_of(experiment)
    model = experiment.bench.model.train()
    layer = fedsr.representation_of(model)
    with torch.no_grad():
        layer.class_mean.uniform_(-1, 1)
        layer.scale.fill_(1.5)
    step = client.forward(0, x, y)
    assert layer.drawn is not None
    mean, spread, z = layer.drawn
    value = fedsr.Simple(0.3, 0.2, squared)(step)
    length = z.pow(2).sum(1) if squared else z.pow(2).sum(1).sqrt()
    references = torch.distributions.Normal(layer.class_mean[y], F.softplus(layer.class_spread[y]))
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(1.5 * mean, 1.5 * spread), references).sum(1)
    torch.testing.assert_close(value, 0.3 * length.mean() + 0.2 * kl.mean())
    torch.testing.assert_close(step.logits, model.head(z))  # type: ignore[operator]
    assert layer.drawn is None


def without_noise(model: nn.Module) -> None:
    """Make the representation pass its input on, without spread."""
    layer = fedsr.representation_of(model)
    with torch.no_grad():
        layer.layer.weight.copy_(torch.cat((torch.eye(layer.width), torch.zeros(layer.width, layer.width))))
        layer.layer.bias.copy_(torch.cat((torch.zeros(layer.width), torch.full((layer.width,), -1e4))))


@pytest.mark.parametrize("sequential", [False, True])
def test_fedsr_that_passes_features_on_is_its_parent(sequential: bool) -> None:
    parent: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, 3)) if sequential else TinyNet()
    model = copy.deepcopy(fedsr.PutRepresentation(0, False)(copy.deepcopy(parent)))
    assert set(parent.state_dict()) < set(model.state_dict())
    without_noise(model)
    x = torch.randn(5, 3, 8, 8)
    for training in (False, True):
        torch.testing.assert_close(model.train(training)(x), parent.train(training)(x))
    probabilities = fedsr.MeanOfSamples(20)(model.eval(), x)
    torch.testing.assert_close(probabilities, parent.eval()(x).softmax(1))


def test_fedsr_predicts_by_the_mean_of_samples_and_repeats() -> None:
    torch.manual_seed(1)
    model = fedsr.PutRepresentation(0, False)(TinyNet()).eval()
    layer, x = fedsr.representation_of(model), torch.randn(4, 3, 8, 8)
    before = torch.get_rng_state()
    found = fedsr.MeanOfSamples(4000)(model, x)
    assert torch.equal(before, torch.get_rng_state()) and layer.noise is None
    torch.testing.assert_close(found[1:3], fedsr.MeanOfSamples(4000)(model, x[1:3]), rtol=1e-5, atol=1e-6)
    stem = model.stem(x)  # type: ignore[operator]
    both = layer.layer(torch.relu(stem + model.branch(stem)).mean(dim=(2, 3)))  # type: ignore[operator]
    z = both[:, :8] + F.softplus(both[:, 8:]) * torch.randn(4000, 4, 8)
    torch.testing.assert_close(found, model.head(z).softmax(2).mean(0), rtol=0, atol=0.02)  # type: ignore[operator]


def test_fedsr_keeps_class_references_and_shares_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    experiment = trained("fedsr")
    own = {f"fedsr.{name}" for name in ("class_mean", "class_spread", "scale")}
    whole = set(experiment.bench.model.state_dict())
    for ask, reply in seen:
        assert set(reply.entries) == set(ask.payloads[reply.client].entries) == whole - own
        assert not reply.extras
    kept = [experiment.delivery.kept[client].entries for client in SIZES]
    assert all(set(entries) == own for entries in kept)
    assert not torch.equal(kept[0]["fedsr.class_mean"], kept[1]["fedsr.class_mean"])
    assert experiment.bench.head == "head" and experiment.bench.plan.entries["fedsr.layer.weight"].kind == "weight"


def test_fedsr_says_when_the_head_is_in_doubt() -> None:
    class Aside(TinyNet):
        """The last linear layer is not the head."""

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            pooled = torch.relu(x + self.branch(x)).mean(dim=(2, 3))
            return self.head(pooled * self.gate(pooled))  # type: ignore[no-any-return]

    with pytest.raises(ModelError, match="head of Aside is in doubt"):
        trained("fedsr", model=Aside())
    convolutional = nn.Sequential(nn.Conv2d(3, 3, 8), nn.Flatten())
    with pytest.raises(ModelError, match="needs a linear layer as its head, found none"):
        trained("fedsr", model=convolutional)
