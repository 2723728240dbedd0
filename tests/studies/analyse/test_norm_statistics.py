"""Check batch-norm statistics of clients and of the pooled data."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from helpers import tiny_runs
from polyfed.core.client import train
from polyfed.core.rounds import Payload
from polyfed.errors import ModelError, SettingError, SharingError
from polyfed.runs.result import Result
from polyfed.studies.analyse.local_models import server_state, states_after_training, states_as_tested
from polyfed.studies.analyse.norm_statistics import (
    SERVER,
    NormStatistics,
    Statistics,
    norm_statistics,
    score_with,
    union_statistics,
)


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


def test_union_statistics_equal_those_of_all_images() -> None:
    experiment = tiny_runs.trained("fedavg", rounds=3, batch_size=26)
    state = copy.deepcopy(experiment.server.state)
    plain = union_statistics(experiment, average="plain")
    moving = union_statistics(experiment)
    x, _ = experiment.federation.pooled().clients[0].train.batch(slice(0, 26))
    maps = nn.functional.conv2d(experiment.bench.preparation.for_testing(x), state["stem.0.weight"], padding=1)
    values = maps.transpose(0, 1).flatten(1).double()
    mean, variance = values.mean(1), values.var(1, correction=1)
    torch.testing.assert_close(plain["stem.1.running_mean"].double(), mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(plain["stem.1.running_var"].double(), variance, rtol=1e-4, atol=1e-6)
    expected = 0.9 * state["stem.1.running_mean"].double() + 0.1 * mean
    torch.testing.assert_close(moving["stem.1.running_mean"].double(), expected, rtol=1e-4, atol=1e-6)
    assert set(plain) == {name for name in state if "running" in name or "num_batches" in name}
    assert all(torch.equal(experiment.server.state[name], value) for name, value in state.items())
    assert all(m.momentum == 0.1 for m in experiment.bench.model.modules() if isinstance(m, nn.BatchNorm2d))


def test_scoring_with_other_statistics_does_not_change_the_run() -> None:
    experiment = tiny_runs.trained("fedavg", rounds=2)
    before = Result(experiment, []).digest
    unchanged = [row for row in experiment.evaluate() if row.view == "seen"]
    assert score_with(experiment, {}) == unchanged
    broken = {"head.weight": torch.zeros(3, 8), "head.bias": torch.tensor([0.0, 9.0, 0.0])}
    rows = score_with(experiment, broken)
    assert all(row.numbers["accuracy"] == pytest.approx(1 / 3) for row in rows)
    assert len(score_with(experiment, union_statistics(experiment))) == 3
    assert Result(experiment, []).digest == before


def test_methods_without_shared_statistics_raise_errors() -> None:
    with pytest.raises(ModelError, match="has no batch-norm statistics"):
        norm_statistics(tiny_runs.built("fedavg + group_norm(groups=2)"))
    with pytest.raises(SettingError, match="source cannot be 'date'"):
        norm_statistics(tiny_runs.built("fedavg"), "date")
    with pytest.raises(SharingError, match="keeps batch-norm statistics at clients"):
        union_statistics(tiny_runs.trained("silobn", rounds=1))
    with pytest.raises(SharingError, match="no batch-norm statistics"):
        union_statistics(tiny_runs.built("fedavg + group_norm(groups=2)"))
