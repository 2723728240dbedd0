"""gPerXAN: the XAN layer against torch, its places, the guiding term by hand, what travels, and identities."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.client import Client, Kept
from polyfed.conversation import NEWCOMER
from polyfed.entries import entries_of
from polyfed.errors import JoinError, ModelError, OptionError, SharingError
from polyfed.experiment import Experiment
from polyfed.layers.places import stages_of
from polyfed.layers.xan import XAN, put_xan
from polyfed.method import Method, parse
from polyfed.methods.guiding import Guide
from polyfed.methods.perxan import ToXAN
from polyfed.result import Result
from polyfed.seeds import generator
from polyfed.settings import Settings
from polyfed.sharing import head, keep_local
from polyfed.testing import SIZES, TinyNet, check_method, tiny_federation
from watching import messages

BATCH_SIDE = {
    f"{layer}.{key}"
    for layer in ("stem.1", "branch.1")
    for key in ("score_bn", *(f"batch_side.{k}" for k in nn.BatchNorm2d(8).state_dict()))
}


def trained(method: str | Method, federation: Any = None, model: nn.Module | None = None, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    values = {"rounds": 3, "batch_size": 4, "lr": 0.05} | changes
    experiment = Experiment(Settings(**values), federation or tiny_federation(), method, model or TinyNet())
    experiment.train()
    return experiment


def used_norm(channels: int = 6, seed: int = 0) -> nn.BatchNorm2d:
    """A batch norm as a pretrained network has it."""
    stream = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.copy_(torch.rand(channels, generator=stream) + 0.5)
    return norm


# --- the layer


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


# --- places


def norms_of(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, XAN)}


def test_places_on_resnets() -> None:
    made = torchvision.models.resnet18(num_classes=3)
    everywhere = norms_of(put_xan(copy.deepcopy(made)))
    assert len(everywhere) == 20 and "bn1" in everywhere and "layer2.0.downsample.1" in everywhere
    first_two = norms_of(put_xan(copy.deepcopy(made), "first_two"))
    assert first_two == {path for path in everywhere if path == "bn1" or path.startswith(("layer1.", "layer2."))}
    assert len(first_two) == 10
    assert norms_of(put_xan(copy.deepcopy(made), "stem")) == {"bn1"}
    assert norms_of(put_xan(copy.deepcopy(made), ("layer4", "layer1.0.bn2"))) == {"layer1.0.bn2"} | {
        path for path in everywhere if path.startswith("layer4.")
    }
    assert norms_of(put_xan(copy.deepcopy(made), ("layer?.0.bn1",))) == {f"layer{n}.0.bn1" for n in (1, 2, 3, 4)}
    wrapped = nn.Sequential(nn.Sequential(made))
    assert norms_of(put_xan(wrapped, ("stem", "layer1"))) == {
        f"0.0.{p}" for p in everywhere if p == "bn1" or p.startswith("layer1.")
    }
    assert stages_of(made) == ["stem", "layer1", "layer2", "layer3", "layer4"]


def test_places_on_densenets() -> None:
    made = torchvision.models.DenseNet(growth_rate=4, block_config=(6, 2, 2, 2), num_init_features=8, num_classes=3)
    first = norms_of(put_xan(copy.deepcopy(made), "first_dense"))
    assert first == {f"features.denseblock1.denselayer{n}.norm{k}" for n in range(1, 7) for k in (1, 2)} | {
        "features.transition1.norm"
    }
    assert norms_of(put_xan(copy.deepcopy(made), ("stem",))) == {"features.norm0"}
    with pytest.raises(ModelError, match=r"no layer to replace at 'layer1'.*denseblock1"):
        put_xan(made, "first_two")


def test_places_on_any_model_by_module_name_and_by_predicate() -> None:
    assert norms_of(put_xan(TinyNet(), "branch")) == {"branch.1"}
    assert norms_of(put_xan(TinyNet(), lambda path, module: path.startswith("stem"))) == {"stem.1"}
    assert norms_of(ToXAN(where=lambda path, module: module.num_features == 8)(TinyNet())) == {"stem.1", "branch.1"}  # type: ignore[arg-type, return-value]
    assert isinstance(put_xan(nn.BatchNorm2d(3)), XAN)
    with pytest.raises(ModelError, match=r"Its layers: stem\.1, branch\.1"):
        put_xan(TinyNet(), "layer1")
    with pytest.raises(ModelError, match="predicate chooses no layer"):
        put_xan(TinyNet(), lambda path, module: False)
    with pytest.raises(ModelError, match="no batch norm of maps"):
        put_xan(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def test_batch_norm_of_vectors_stays_and_is_personal() -> None:
    class WithVectorNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6))
            self.vectors = nn.BatchNorm1d(6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.relu(self.vectors(self.maps(x))))
            return out

    experiment = trained("gperxan", model=WithVectorNorm(), rounds=1)
    assert norms_of(experiment.bench.model) == {"maps.1"}
    assert experiment.bench.plan.at(1).travels["vectors.weight"].words == "uploaded, never sent back"


def test_small_maps_of_a_resnet_in_a_run() -> None:
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)
    with pytest.raises(ModelError, match="one position"):
        trained("gperxan", model=model)
    trained('gperxan(tiny_maps="skip")', model=model, rounds=1)
    trained('gperxan(where="stem")', model=model, rounds=1)


# --- the guiding term


def test_the_gradient_of_guiding_is_by_hand_and_never_reaches_the_head() -> None:
    bench = trained("guiding(weight=0.7)", rounds=1).bench
    client = Client(tiny_federation().clients[0], bench, Kept(), 1)
    stream = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(3, 8, generator=stream), torch.randn(3, generator=stream)
    client.received = {"head.weight": weight, "head.bias": bias}
    x, y = client.data.train.batch(slice(0, 5))
    x = bench.preparation.for_testing(x)
    twin = copy.deepcopy(bench.model).train()
    bench.model.train()
    step = client.forward(0, x, y)
    bench.model.zero_grad()
    value = Guide(0.7)(step)
    value.backward()  # type: ignore[no-untyped-call]

    stem = twin.stem(x)  # type: ignore[operator]
    features = torch.relu(stem + twin.branch(stem)).mean(dim=(2, 3))  # type: ignore[operator]
    logits = features @ weight.T + bias
    by_hand = 0.7 * (logits.logsumexp(1) - logits[torch.arange(5), y]).mean()
    names = [name for name, _ in twin.named_parameters() if not name.startswith("head.")]
    gradients = torch.autograd.grad(by_hand, [twin.get_parameter(name) for name in names])
    torch.testing.assert_close(value, by_hand)
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(bench.parameters[name].grad, gradient, rtol=1e-4, atol=1e-6)
    assert bench.parameters["head.weight"].grad is None and bench.parameters["head.bias"].grad is None


def test_gfedavg_with_one_client_is_a_hand_written_loop() -> None:
    federation = tiny_federation({"only": 12})
    experiment = trained("fedavg + guiding(weight=0.5)", federation, rounds=2)
    torch.manual_seed(3)
    model = TinyNet().train()
    for number in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        frozen = copy.deepcopy(model.head).requires_grad_(False)
        for chunk in torch.randperm(12, generator=generator(0, "client", number, "only")).split(4):
            x, y = federation.clients[0].train.batch(chunk)
            stem = model.stem(federation.preparation.for_testing(x))
            features = torch.relu(stem + model.branch(stem)).mean(dim=(2, 3))
            optimizer.zero_grad()
            loss = F.cross_entropy(model.head(features), y) + 0.5 * F.cross_entropy(frozen(features), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(experiment.server.state[name], value, rtol=1e-5, atol=1e-6)


def test_guiding_uses_the_loss_of_the_run_and_zero_is_neutral() -> None:
    bench = trained("guiding", rounds=1).bench
    bench.loss = lambda logits, y: (logits * 2).sum()
    client = Client(tiny_federation().clients[0], bench, Kept(), 1)
    client.received = {"head.weight": torch.zeros(3, 8), "head.bias": torch.tensor([1.0, 2.0, 3.0])}
    x, y = client.data.train.batch(slice(0, 4))
    value = Guide(0.25)(client.forward(0, bench.preparation.for_testing(x), y))
    assert float(value.detach()) == pytest.approx(0.25 * 2 * 6 * 4)
    plain = Result(trained("fedavg"), []).digest
    assert Result(trained("guiding(weight=0.0)"), []).digest == plain
    assert Result(trained("guiding"), []).digest != plain


def test_a_head_with_buffers_is_not_written_to_by_the_guide() -> None:
    class DeepHead(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))  # type: ignore[assignment]

    experiment = Experiment(
        Settings(rounds=1, local_steps=2, batch_size=4, head="head", drop=0.0), tiny_federation(), "guiding", DeepHead()
    )
    before = {name: value.clone() for name, value in experiment.server.state.items()}
    sent = experiment.server.state
    experiment.train()
    assert all(torch.equal(sent[name], before[name]) for name in before)
    assert int(experiment.server.state["head.1.num_batches_tracked"]) == 2


def test_guiding_without_a_received_head_is_an_error() -> None:
    class Doubtful(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with pytest.raises(ModelError, match=r"guiding.*--head"):
        trained("guiding", model=Doubtful())
    with pytest.raises(ModelError, match=r"--head"):
        trained("gperxan", model=Doubtful())
    trained("guiding", model=Doubtful(), head="head", rounds=1)
    own_head = Method("own_head", sharing=(keep_local(head),))
    for value in (parse("local + guiding"), own_head + parse("guiding").atoms[-1]):
        with pytest.raises(JoinError, match="no received head"):
            trained(value)
    with pytest.raises(JoinError, match="already"):
        trained("gperxan + guiding")


# --- the method


def test_gperxan_is_perxan_and_guiding() -> None:
    joined = trained("perxan + guiding(weight=0.5)")
    whole = trained("gperxan")
    assert all(torch.equal(whole.server.state[name], value) for name, value in joined.server.state.items())
    assert Result(trained("gperxan(guide=0.0)"), []).digest == Result(trained("perxan"), []).digest
    assert not torch.equal(whole.server.state["stem.0.weight"], trained("perxan").server.state["stem.0.weight"])


def test_without_instance_side_and_guide_it_is_fedbn() -> None:
    ours = trained("gperxan(guide=0.0, instance_score=-10000.0)", weights="uniform", momentum=0.9)
    fedbn = trained("fedbn", weights="uniform", momentum=0.9)
    renamed = {name.replace("batch_side.", ""): value for name, value in ours.server.state.items()}
    compared = 0
    for name in fedbn.bench.plan.at(1).down:
        if not name.startswith("optimizer/"):
            torch.testing.assert_close(renamed[name], fedbn.server.state[name], rtol=0, atol=1e-6)
            compared += 1
    for client, kept in fedbn.delivery.kept.items():
        own = {name.replace("batch_side.", ""): value for name, value in ours.delivery.kept[client].entries.items()}
        for name, value in kept.entries.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-6)
            compared += 1
    assert compared == 5 + 3 * 10


@pytest.mark.parametrize("text", ["perxan", "gperxan"])
def test_the_batch_side_goes_up_and_never_down(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    experiment = trained(text, rounds=2)
    whole = set(experiment.bench.model.state_dict())
    assert whole > BATCH_SIDE and len(seen) == 6
    for ask, reply in seen:
        assert set(reply.entries) == whole
        assert set(ask.payloads[reply.client].entries) == whole - BATCH_SIDE
        assert not reply.extras and not ask.payloads[reply.client].extras
    experiment.evaluate()
    assert not any(set(ask.payloads[reply.client].entries) & BATCH_SIDE for ask, reply in seen)
    assert not any(ask.purpose == NEWCOMER for ask, _ in seen)
    assert all(set(kept.entries) == BATCH_SIDE for kept in experiment.delivery.kept.values())


def test_the_newcomer_is_the_weighted_average_of_everything() -> None:
    experiment = trained("gperxan")
    state, total = experiment.newcomer_state(), sum(SIZES.values())
    for name in ("stem.1.batch_side.running_mean", "branch.1.batch_side.weight", "stem.1.score_bn"):
        mean = sum(SIZES[c] / total * experiment.delivery.kept[c].entries[name].double() for c in SIZES)
        torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-7)
    spread = [experiment.delivery.kept[c].entries["stem.1.batch_side.running_mean"] for c in SIZES]
    assert not torch.equal(spread[0], spread[1])


def words(text: str, name: str) -> str:
    experiment = Experiment(Settings(), tiny_federation(), text, TinyNet())
    return experiment.bench.plan.at(1).travels[name].words


def test_who_keeps_the_scores_and_the_remaining_batch_norms() -> None:
    personal = "uploaded, never sent back"
    assert [words("perxan", f"stem.1.score_{side}") for side in ("in", "bn")] == ["shared", personal]
    assert [words('perxan(mix_local="both")', f"stem.1.score_{side}") for side in ("in", "bn")] == [personal, personal]
    assert [words('perxan(mix_local="none")', f"stem.1.score_{side}") for side in ("in", "bn")] == ["shared", "shared"]
    partly = 'gperxan(where="stem"{})'
    assert words(partly.format(""), "branch.1.running_mean") == personal
    assert words(partly.format(', rest="shared"'), "branch.1.running_mean") == "shared"
    assert words(partly.format(', rest="shared"'), "stem.1.batch_side.running_mean") == personal
    assert words("perxan", "stem.1.instance_side.weight") == "shared"


@pytest.mark.parametrize(
    "text",
    [
        'gperxan(guide=1.0, where="stem", rest="shared", mix_local="both", in_init="ones")',
        'perxan(where=("branch",), mix_local="none", tiny_maps="skip")',
        'gperxan + momentum(keep="local") + fedprox(mu=0.01)',
        "fedbn + guiding(weight=1.0)",
    ],
)
def test_variants_keep_the_contract(text: str) -> None:
    check_method(text)


def test_options_are_checked_and_clashes_named() -> None:
    for text, told in {
        'gperxan(mix_local="bn")': "gperxan: mix_local",
        'perxan(rest="locl")': "Did you mean local",
        'perxan(in_init="zeros")': "in_init",
        'perxan(tiny_maps="pad")': "tiny_maps",
        "perxan(where=())": "where takes all",
        "perxan(where=3)": "where takes all",
        "gperxan(guide=-1.0)": "guide must not be negative",
        "guiding(weight=-0.5)": "weight must not be negative",
    }.items():
        with pytest.raises(OptionError, match=told):
            parse(text)
    with pytest.raises(JoinError, match="norm"):
        parse("gperxan + group_norm")
    with pytest.raises(SharingError, match="disagree"):
        trained("perxan + fedbn")
    assert str(parse("guiding + fedavg")) == "fedavg + guiding(weight=0.5)"
