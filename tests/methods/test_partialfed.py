"""PartialFed: what is skipped goes up and stays; what clients learn to load."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.tiny_runs import built, digest_of, trained
from helpers.watching import watched
from polyfed.core.client import Client
from polyfed.core.workbench import ClientState
from polyfed.errors import SharingError
from polyfed.methods.partialfed import LearnStrategy, Mixed, between, layers_of, temperature
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.testing import TinyNet


def test_what_is_skipped_goes_up_and_never_comes_back() -> None:
    experiment = built("partialfed_fix")
    seen = watched(experiment)
    everything = set(TinyNet().state_dict())
    own = {name for name in everything if name.startswith(("stem.1.", "branch.1.", "head."))}
    assert len(own) == 12
    assert seen[1, "train"] == seen[2, "train"] == (everything - own, everything)
    kept = {client: k.entries for client, k in experiment.backend.client_states.items()}
    assert all(set(entries) == own for entries in kept.values())
    sizes = {"big": 13, "middle": 8, "small": 5}
    for name in ("head.weight", "stem.1.running_mean"):
        mean = sum(sizes[client] / 26 * kept[client][name] for client in sizes)
        torch.testing.assert_close(experiment.server.state[name], mean, rtol=1e-5, atol=1e-6)
    model = Result(experiment, []).model_for("small").state_dict()
    assert all(torch.equal(model[n], kept["small"][n] if n in own else experiment.server.state[n]) for n in everything)


def test_partialfed_fix_identities() -> None:
    assert digest_of("partialfed_fix(skip=())") == digest_of("fedavg")
    local = trained('partialfed_fix(skip=("batch_norm",))')
    fedbn = trained("fedbn")
    assert all(torch.equal(fedbn.server.state[n], local.server.state[n]) for n in ("stem.0.weight", "head.weight"))
    by_pattern = watched(built('partialfed_fix(skip=("branch.*", "head")) + agc'))[2, "train"][0]
    assert by_pattern == {name for name in TinyNet().state_dict() if name.startswith("stem.")}
    with pytest.raises(SharingError, match="no batch norm"):
        built("partialfed_fix + group_norm(groups=2)")


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
    client = Client(data, experiment.bench, ClientState(own), 2)
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
    client = Client(data, experiment.bench, ClientState(own, memory or {}), 2)
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
        return temperature(Client(experiment.federation.clients[0], experiment.bench, ClientState(), number))

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
    client = Client(experiment.federation.clients[1], experiment.bench, ClientState(), 2)
    assert LearnStrategy(share, 0.1).steps(client) == steps


def test_one_step_of_the_logits_by_hand() -> None:
    """Gumbel noise, softmax, straight-through and chain rule in numpy; torch gives the gradient of an ordinary model only."""
    experiment = built("partialfed_adaptive", rounds=3)
    before = np.array([[0.3, -0.2], [0.0, 0.4], [0.1, 0.1], [-0.5, 0.2], [0.6, 0.5]])
    client, sent, own = with_own_model(experiment, {"partialfed_logits": torch.tensor(before, dtype=torch.float32)})
    x, y = next(Client(client.data, experiment.bench, ClientState(), 2).batches())
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
    for kept in experiment.backend.client_states.values():
        assert set(kept.entries) == everything and kept.memory["partialfed_logits"].shape == (5, 2)
        assert bool(kept.memory["partialfed_logits"].any())
    assert experiment.costs.bytes["up"]["training"].get("extra", 0) == 0
    assert {row.client for row in experiment.evaluate() if row.view == "seen"} == {"big", "middle", "small"}
