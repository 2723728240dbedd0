"""SCAFFOLD: control variates by hand, identities, and what travels."""

from __future__ import annotations

import pytest
import torch

from helpers.sgd_by_hand import local_run
from helpers.tiny_runs import PARAMETERS, assert_near, built, trained
from polyfed.errors import JoinError, SettingError
from polyfed.testing import TinyNet


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_scaffold_by_hand_with_mean_gradients(weights: str) -> None:
    """Under plain SGD the new control variate of option II is the mean of the round's raw gradients."""
    experiment = trained("scaffold", weights=weights, rounds=3)
    sizes = {"big": 13, "middle": 8, "small": 5} if weights == "samples" else dict.fromkeys(("big", "middle", "small"), 1)
    share = {client: size / sum(sizes.values()) for client, size in sizes.items()}
    state, own = dict(experiment.bench.initial), {client: {n: torch.zeros(()) for n in PARAMETERS} for client in share}
    for number in (1, 2, 3):
        control = {n: sum((share[k] * own[k][n] for k in share), torch.zeros(())) for n in PARAMETERS}
        runs = {k: local_run(state, experiment, k, number, {n: control[n] - own[k][n] for n in PARAMETERS}) for k in share}
        own = {k: run[1] for k, run in runs.items()}
        floats = [name for name in state if state[name].is_floating_point()]
        state = state | {n: sum((share[k] * runs[k][0][n] for k in share), torch.zeros(())) for n in floats}
    assert_near(experiment.server.state, {name: state[name] for name in floats}, 1e-5)
    for client, expected in own.items():
        assert_near(experiment.backend.client_states[client].memory["scaffold"], expected, 1e-4)
    mean = {n: sum((share[k] * own[k][n] for k in share), torch.zeros(())) for n in PARAMETERS}
    assert_near(experiment.server.memory["scaffold"], mean, 1e-4)


def test_the_first_round_of_scaffold_is_fedavg_to_the_bit_and_what_travels_is_counted() -> None:
    first, plain = trained("scaffold", rounds=1), trained("fedavg", rounds=1)
    assert all(torch.equal(first.server.state[name], value) for name, value in plain.server.state.items())
    size = 4 * sum(p.numel() for p in TinyNet().parameters())
    assert first.costs.total("up") == plain.costs.total("up") + 3 * size
    assert first.costs.total("down") == plain.costs.total("down")
    second = trained("scaffold")
    assert second.costs.bytes["up"]["training"]["extra"] == 6 * size
    assert second.costs.bytes["down"]["training"]["extra"] == 3 * size


def test_scaffold_keeps_absent_clients_and_local_entries_out() -> None:
    experiment = trained("fedbn + scaffold + agc", rounds=1, clients_per_round=2)
    assert len(experiment.backend.client_states) == 2
    own = {client: kept.memory["scaffold"] for client, kept in experiment.backend.client_states.items()}
    sizes = {"big": 13, "middle": 8, "small": 5}
    mean = {n: sum((sizes[k] / 26 * own[k][n] for k in own), torch.zeros(())) for n in next(iter(own.values()))}
    assert set(mean) == {"stem.0.weight", "branch.0.weight", "branch.0.bias", "head.weight", "head.bias"}
    assert_near(experiment.server.memory["scaffold"], mean)


def test_scaffold_refuses_what_hides_gradients() -> None:
    with pytest.raises(SettingError, match="--optimizer sgd"):
        built("scaffold", optimizer="adam")
    with pytest.raises(JoinError, match="carried-over momentum"):
        built('scaffold + momentum(keep="local")', momentum=0.9)


def test_server_lr_of_scaffold_scales_the_step() -> None:
    half, whole = trained("scaffold(server_lr=0.5)", rounds=1), trained("scaffold", rounds=1)
    start = half.bench.initial
    assert_near(half.server.state, {n: (start[n] + whole.server.state[n]) / 2 for n in PARAMETERS})
    assert torch.equal(half.server.state["stem.1.running_mean"], whole.server.state["stem.1.running_mean"])
