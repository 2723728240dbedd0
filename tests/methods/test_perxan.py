"""PerXAN and gPerXAN: which norms are replaced, what travels, guiding, and identities."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torchvision
from torch import Tensor, nn

from helpers import tiny_runs
from helpers.watching import messages
from polyfed.core.method import parse
from polyfed.core.rounds import NEWCOMER
from polyfed.errors import JoinError, ModelError, SharingError
from polyfed.methods.perxan import ToXAN
from polyfed.models.layers.norms import XAN, put_xan
from polyfed.models.layers.surgery import stages_of
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.testing import SIZES, TinyNet, tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


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
    with pytest.raises(ModelError, match="predicate selects no layer"):
        put_xan(TinyNet(), lambda path, module: False)
    with pytest.raises(ModelError, match="no batch norm of feature maps"):
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


BATCH_SIDE = {
    f"{layer}.{key}"
    for layer in ("stem.1", "branch.1")
    for key in ("score_bn", *(f"batch_side.{k}" for k in nn.BatchNorm2d(8).state_dict()))
}


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
    for client, kept in fedbn.backend.client_states.items():
        own = {name.replace("batch_side.", ""): value for name, value in ours.backend.client_states[client].entries.items()}
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
    assert all(set(kept.entries) == BATCH_SIDE for kept in experiment.backend.client_states.values())


def test_the_newcomer_is_the_weighted_average_of_everything() -> None:
    experiment = trained("gperxan")
    state, total = experiment.newcomer_state(), sum(SIZES.values())
    for name in ("stem.1.batch_side.running_mean", "branch.1.batch_side.weight", "stem.1.score_bn"):
        mean = sum(SIZES[c] / total * experiment.backend.client_states[c].entries[name].double() for c in SIZES)
        torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-7)
    spread = [experiment.backend.client_states[c].entries["stem.1.batch_side.running_mean"] for c in SIZES]
    assert not torch.equal(spread[0], spread[1])


def test_clashes_are_named() -> None:
    with pytest.raises(JoinError, match="norm"):
        parse("gperxan + group_norm")
    with pytest.raises(SharingError, match="disagree"):
        trained("perxan + fedbn")
    assert str(parse("guiding + fedavg")) == "fedavg + guiding(weight=0.5)"
