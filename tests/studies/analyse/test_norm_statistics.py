"""Batch-norm statistics of clients: those of their images, of their training, and of what they keep."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from helpers import tiny_runs
from polyfed.core.client import train
from polyfed.core.rounds import Payload
from polyfed.errors import ModelError, SettingError
from polyfed.studies.analyse.local_models import server_state, states_after_training, states_as_tested
from polyfed.studies.analyse.norm_statistics import SERVER, NormStatistics, Statistics, norm_statistics


def test_statistics_of_the_data_are_those_of_the_images() -> None:
    experiment = tiny_runs.built("fedavg")
    found = norm_statistics(experiment)
    assert list(found.by_owner) == ["big", "middle", "small", SERVER] and found.layers == ["stem.1", "branch.1"]
    weight = experiment.server.state["stem.0.weight"]
    for client in experiment.federation.clients:
        x = experiment.bench.preparation.for_testing(client.train.batch(slice(None))[0])
        values = nn.functional.conv2d(x, weight, padding=1).transpose(0, 1).flatten(1).double()
        mine = found.by_owner[client.id]["stem.1"]
        torch.testing.assert_close(mine.mean.double(), values.mean(1), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(mine.variance.double(), values.var(1), rtol=1e-4, atol=1e-6)
    assert len(found.rows()) == 4 * 2 * 8


def test_distances_are_those_worked_out_by_hand() -> None:
    one = Statistics(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 4.0]))
    other = Statistics(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 1.0]))
    (found,) = NormStatistics("kept", {"a": {"norm": one}, "b": {"norm": other}}).distances()
    assert (found.layer, found.one, found.other) == ("norm", "a", "b")
    assert found.mean == pytest.approx(5.0) and found.variance == pytest.approx(3.0)
    assert found.shift == pytest.approx(math.sqrt((9 / 1 + 16 / 2.5) / 2), rel=1e-4)


def test_clients_that_share_their_statistics_keep_the_same_and_train_others() -> None:
    experiment = tiny_runs.trained("fedavg")
    kept, trained = norm_statistics(experiment, "kept"), norm_statistics(experiment, "trained")
    assert kept.mean_shift() == 0 and all(one.shift == 0 for one in kept.distances())
    assert trained.mean_shift() > 0
    own = norm_statistics(tiny_runs.trained("fedbn"), "kept")
    assert own.mean_shift() > 0


def test_trained_models_are_those_that_the_clients_would_upload() -> None:
    experiment = tiny_runs.trained("fedavg", rounds=1)
    state = {name: value.clone() for name, value in experiment.server.state.items()}
    found = dict(states_after_training(experiment, steps=1000))
    client = tiny_runs.client_of(experiment)
    reply = train(client, Payload(dict(experiment.server.state)))
    assert all(torch.equal(found[client.id][name], value) for name, value in reply.entries.items())
    few = dict(states_after_training(experiment, steps=1))
    assert not torch.equal(few[client.id]["head.weight"], found[client.id]["head.weight"])
    assert all(torch.equal(experiment.server.state[name], value) for name, value in state.items())
    assert all(torch.equal(one["head.weight"], state["head.weight"]) for _, one in states_as_tested(experiment))


def test_a_method_without_a_single_model_has_the_mean_of_its_models() -> None:
    experiment = tiny_runs.trained("hfedf", rounds=1)
    states = [state["head.weight"] for _, state in states_as_tested(experiment)]
    torch.testing.assert_close(server_state(experiment)["head.weight"], torch.stack(states).mean(0))


def test_what_does_not_apply_says_why() -> None:
    with pytest.raises(ModelError, match="has no batch-norm statistics"):
        norm_statistics(tiny_runs.built("fedavg + group_norm(groups=2)"))
    with pytest.raises(SettingError, match="source cannot be 'date'"):
        norm_statistics(tiny_runs.built("fedavg"), "date")
