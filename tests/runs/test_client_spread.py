"""Client spread, compared with torch's standard deviation over the models that clients are tested with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.tiny_runs import built, trained
from polyfed.runs.callbacks.training_metrics import (
    MAX_CLIENTS,
    SPREAD,
    StatisticsDrift,
    differing_entries,
    few_clients,
    spread_lines,
)
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run


def lines_of(experiment: Experiment) -> dict[str, dict[str, float]]:
    lines = spread_lines(experiment.server, experiment.backend, experiment.bench.initial)
    assert all(line["round"] == experiment.server.round and line["view"] == SPREAD for line in lines)
    return {line["kind"]: {key: line[key] for key in ("deviation", "relative")} for line in lines}


def numbers(models: list[dict[str, torch.Tensor]], names: list[str]) -> dict[str, float]:
    values = torch.stack([torch.cat([model[name].flatten() for name in names]) for model in models]).double()
    spread = values.std(dim=0, correction=0)
    return {"deviation": float(spread.mean()), "relative": float(spread.square().mean().sqrt() / values.square().mean().sqrt())}


def test_local_layers_are_those_that_clients_keep() -> None:
    experiment = trained("fedbn")
    found = lines_of(experiment)
    assert set(found) == {"norm_affine", "norm_stat"}
    models = [dict(experiment.backend.state_of(client).entries) for client in experiment.server.client_ids]
    for kind, named in found.items():
        names = [name for name, entry in experiment.bench.plan.entries.items() if entry.kind == kind and name in models[0]]
        assert named == pytest.approx(numbers(models, names), rel=1e-4)


def test_generated_models_are_those_that_are_sent() -> None:
    experiment = trained("hfedf")
    found = lines_of(experiment)
    assert {"weight", "head", "norm_affine", "norm_stat"} == set(found)
    models = [experiment.server.outgoing(client) for client in experiment.server.client_ids]
    names = [name for name, entry in experiment.bench.plan.entries.items() if entry.kind == "weight"]
    assert found["weight"] == pytest.approx(numbers(models, names), rel=1e-4)


def test_equal_models_have_no_spread_and_untrained_clients_none_yet() -> None:
    assert lines_of(trained("fedavg")) == {}
    assert all(numbers == {"deviation": 0.0, "relative": 0.0} for numbers in lines_of(built("fedbn")).values())
    one_client = built("fedbn", {"alone": 8})
    assert list(differing_entries(one_client.server, one_client.backend, one_client.bench.initial)) == []


def test_every_round_of_a_run_is_written_down(tmp_path: Path) -> None:
    for method, kinds in (("fedbn", {"norm_affine", "norm_stat"}), ("fedavg", set())):
        folder = RunFolder(tmp_path / method)
        train_run(built(method, rounds=2), folder)
        lines = [line for line in folder.metrics() if line["view"] == SPREAD]
        assert {(line["round"], line["kind"]) for line in lines} == {(number, kind) for number in (1, 2) for kind in kinds}


def test_of_many_clients_a_few_are_looked_at() -> None:
    experiment = built("fedbn", {f"c{number:03d}": 2 for number in range(5 * MAX_CLIENTS + 3)})
    read: list[str] = []
    state_of = experiment.backend.state_of
    experiment.backend.state_of = lambda client: (read.append(client), state_of(client))[1]  # type: ignore[method-assign]
    assert set(lines_of(experiment)) == {"norm_affine", "norm_stat"}
    assert len(set(read)) == len(read) == MAX_CLIENTS
    assert (read[0], read[-1] > "c090") == ("c000", True)


def test_the_drift_of_statistics_looks_at_the_same_few() -> None:
    experiment = built("fedbn", {f"c{number:03d}": 2 for number in range(5 * MAX_CLIENTS + 3)})
    read: list[str] = []
    state_of = experiment.backend.state_of
    experiment.backend.state_of = lambda client: (read.append(client), state_of(client))[1]  # type: ignore[method-assign]
    drift = StatisticsDrift(experiment.bench.plan, experiment.server, experiment.backend)
    drift.lines(experiment.server, experiment.backend)
    assert set(read) <= set(few_clients(experiment.server)) and len(read) <= 2 * MAX_CLIENTS
