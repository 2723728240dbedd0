"""Check the drift of batch-norm statistics and the values that a method logs per round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.recorded_runs import experiment_of
from helpers.tiny_runs import tiny_net
from polyfed.errors import RunFolderError
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings
from polyfed.studies.analyse.rounds import noted, statistics_drift
from polyfed.testing import tiny_federation


def recorded(folder: Path, experiment: Experiment) -> list[dict]:
    train_run(experiment, RunFolder(folder))
    return RunFolder(folder).metrics()


def statistics_of(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.double() for name, value in state.items() if "running" in name])


def test_one_client_moves_the_server_to_its_own_statistics(tmp_path: Path) -> None:
    settings = Settings(rounds=2, batch_size=4)
    experiment = Experiment(settings, tiny_federation({"only": 9}), "fedavg", tiny_net())
    states = [statistics_of(experiment.server.state)]
    experiment_train = experiment.train
    experiment.train = lambda observers=(), **how: experiment_train(
        [*observers, lambda server: states.append(statistics_of(server.state)) if server.round else None], **how
    )
    found = statistics_drift(recorded(tmp_path / "run", experiment))
    for number in (1, 2):
        moved = float((states[number] - states[number - 1]).abs().sum())
        assert found.change[number] == pytest.approx(moved, rel=1e-5)
        assert found.distance["only"][number] == pytest.approx(moved, rel=1e-5)
    watched = torch.stack(states[1:])[:, :: len(states[0]) // 32][:, :32]
    assert found.variance["only"] == {2: pytest.approx(float(watched.var(0, correction=0).mean()), rel=1e-3)}


def test_statistics_that_stay_at_clients_are_compared_with_their_mean(tmp_path: Path) -> None:
    experiment = experiment_of("fedbn", rounds=1)
    found = statistics_drift(recorded(tmp_path / "run", experiment))
    kept = {c: statistics_of(experiment.backend.state_of(c).entries) for c in experiment.server.client_ids}
    before = statistics_of(experiment.bench.initial)
    assert found.distance == {c: {1: pytest.approx(float((v - before).abs().sum()), rel=1e-5)} for c, v in kept.items()}
    mean = torch.stack(list(kept.values())).mean(0)
    assert found.change == {1: pytest.approx(float((mean - before).abs().sum()), rel=1e-5)}


def test_the_window_of_the_variance_moves() -> None:
    lines = [
        {"round": r, "view": "statistics", "client": "a", "distance": 0.0, "sample": [value, 5.0]}
        for r, value in ((1, 0.0), (2, 2.0), (3, 2.0))
    ]
    assert statistics_drift(lines, window=2).variance == {"a": {2: 0.5, 3: 0.0}}
    assert statistics_drift(lines, window=3).variance["a"][3] == pytest.approx((8 / 9) / 2)
    with pytest.raises(RunFolderError, match="stored no batch-norm statistics"):
        statistics_drift([])


def test_hfedf_logs_weights_and_embeddings(tmp_path: Path) -> None:
    experiment = experiment_of("hfedf", rounds=2)
    found = noted(recorded(tmp_path / "run", experiment))
    weights = found.numbers["alignment_weight"]
    assert set(weights) == {"big", "middle", "small"}
    assert all(sum(one[number] for one in weights.values()) == pytest.approx(1) for number in (1, 2))
    table = experiment.server.memory["hypernetwork"].network.embedding.weight
    rows = {info.id: table[place].tolist() for place, info in enumerate(experiment.server.clients)}
    assert {client: by_round[2] for client, by_round in found.vectors["embedding"].items()} == rows
    with pytest.raises(RunFolderError, match="logs no values per client"):
        noted(recorded(tmp_path / "other", experiment_of("fedavg", rounds=1)))


def test_deviations_and_distances_equal_a_manual_calculation() -> None:
    weights = {"a": 0.2, "b": 0.3, "c": 0.5}
    found = noted([{"round": 1, "view": "noted", "client": client, "weight": value} for client, value in weights.items()])
    assert found.largest_deviation("weight") == ("c", pytest.approx(0.5 - 1 / 3))
    lines = [
        {"round": number, "view": "noted", "client": client, "weight": weight, "embedding": place}
        for number, client, weight, place in (
            (1, "a", 0.9, [9.0, 0.0]),
            (1, "b", 0.1, [0.0, 0.0]),
            (2, "a", 0.6, [3.0, 0.0]),
            (2, "b", 0.4, [0.0, 4.0]),
        )
    ]
    found = noted(lines)
    assert found.largest_deviation("weight")[1] == pytest.approx(0.4) and found.last_deviation("weight") == pytest.approx(0.1)
    assert found.max_distance() == pytest.approx(5.0)
