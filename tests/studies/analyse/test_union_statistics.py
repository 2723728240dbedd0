"""Statistics of all clients' images together, and scores with other statistics."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

from helpers import tiny_runs
from polyfed.errors import SharingError
from polyfed.runs.result import Result
from polyfed.studies.analyse.norm_statistics import score_with, union_statistics

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_statistics_of_the_union_are_those_of_all_images() -> None:
    experiment = trained("fedavg", batch_size=26)
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


def test_scores_with_other_statistics_leave_the_run_alone() -> None:
    experiment = trained("fedavg", rounds=2)
    before = Result(experiment, []).digest
    usual = [row for row in experiment.evaluate() if row.view == "seen"]
    assert score_with(experiment, {}) == usual
    broken = {"head.weight": torch.zeros(3, 8), "head.bias": torch.tensor([0.0, 9.0, 0.0])}
    rows = score_with(experiment, broken)
    assert all(row.numbers["accuracy"] == pytest.approx(1 / 3) for row in rows)
    assert len(score_with(experiment, union_statistics(experiment))) == 3
    assert Result(experiment, []).digest == before


def test_the_union_probe_needs_shared_statistics() -> None:
    with pytest.raises(SharingError, match="keeps batch-norm statistics at clients"):
        union_statistics(trained("silobn", rounds=1))
    with pytest.raises(SharingError, match="no batch-norm statistics"):
        union_statistics(trained("fedavg + group_norm(groups=2)", rounds=1))
