"""FedSR: its terms by hand, predictions by samples, and what stays at clients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.tiny_runs import batch_of, trained
from helpers.watching import messages
from polyfed.errors import ModelError
from polyfed.methods import fedsr
from polyfed.testing import SIZES, TinyNet


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
    model = copy.deepcopy(fedsr.PutRepresentation(0, False)(copy.deepcopy(parent), "3" if sequential else "head"))
    assert set(parent.state_dict()) < set(model.state_dict())
    without_noise(model)
    x = torch.randn(5, 3, 8, 8)
    for training in (False, True):
        torch.testing.assert_close(model.train(training)(x), parent.train(training)(x))
    probabilities = fedsr.MeanOfSamples(20)(model.eval(), x)
    torch.testing.assert_close(probabilities, parent.eval()(x).softmax(1))


def test_fedsr_predicts_by_the_mean_of_samples_and_repeats() -> None:
    torch.manual_seed(1)
    model = fedsr.PutRepresentation(0, False)(TinyNet(), "head").eval()
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
    kept = [experiment.backend.client_states[client].entries for client in SIZES]
    assert all(set(entries) == own for entries in kept)
    assert not torch.equal(kept[0]["fedsr.class_mean"], kept[1]["fedsr.class_mean"])
    assert experiment.bench.head == "head" and experiment.bench.plan.entries["fedsr.layer.weight"].kind == "weight"


def test_fedsr_finds_the_head_that_is_not_the_last_linear_layer() -> None:
    class Aside(TinyNet):
        """The last linear layer is not the head."""

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Sequential(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            pooled = torch.relu(x + self.branch(x)).mean(dim=(2, 3))
            return self.head(pooled * self.gate(pooled))  # type: ignore[no-any-return]

    experiment = trained("fedsr", model=Aside(), rounds=1)
    client, x, y = batch_of(experiment)
    experiment.bench.model.train()
    step = client.forward(0, x, y)
    drawn = fedsr.representation_of(experiment.bench.model).drawn
    assert experiment.bench.head == "head" and drawn is not None
    torch.testing.assert_close(step.logits, experiment.bench.model.head(drawn[2]))  # type: ignore[operator]


def test_fedsr_says_when_the_head_is_in_doubt_or_not_linear() -> None:
    convolutional = nn.Sequential(nn.Conv2d(3, 3, 8), nn.Flatten())
    with pytest.raises(ModelError, match=r"fedsr\(.*\) replaces the head of the model: .*specify the head with --head"):
        trained("fedsr", model=convolutional)
    with pytest.raises(ModelError, match="needs a linear layer as its head, got Conv2d"):
        trained("fedsr", model=convolutional, head="0")
