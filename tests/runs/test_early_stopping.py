"""Early stopping: a run ends when a metric on validation data has not improved for some evaluations, resumed or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.recorded_runs import Killed, experiment_of, go_on
from helpers.tiny_runs import tiny_net
from helpers.watching import AfterRound
from polyfed.core.evaluation import Row
from polyfed.errors import DataError, SettingError
from polyfed.runs.callbacks.callback import RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings
from polyfed.testing import tiny_federation


def scored_by(values: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the validation scores of the rounds."""
    evaluate = Experiment.evaluate

    def scored(self: Experiment, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> list[Row]:
        rows = evaluate(self, split, newcomer, in_detail)
        if split != "validation":
            return rows
        return [replace(row, numbers={**row.numbers, "accuracy": values[self.server.round - 1]}) for row in rows]

    monkeypatch.setattr(Experiment, "evaluate", scored)


@pytest.mark.parametrize("selection", ["last", "best_validation"])
def test_a_run_stops_when_a_metric_has_not_improved_for_some_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    scored_by([0.5, 0.7, 0.6, 0.7, 0.9, 0.9, 0.9], monkeypatch)
    values: dict[str, Any] = {"rounds": 7, "selection": selection, "early_stopping": "accuracy(patience=2)"}
    result = train_run(experiment_of(**values), RunFolder(tmp_path / "run"))
    assert result.experiment.server.round == 4
    assert go_on(tmp_path / "run").digest == result.digest
    lines = RunFolder(tmp_path / "run").metrics()
    assert sum(line["view"] == "validation" for line in lines) == 4 * len(result.experiment.federation.clients)
    assert train_run(experiment_of(**values | {"early_stopping": "auto(patience=3)"}), None).experiment.server.round == 7


def test_a_resumed_run_stops_early_in_the_same_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored_by([0.5, 0.7, 0.6, 0.7, 0.9, 0.9, 0.9], monkeypatch)
    values: dict[str, Any] = {"rounds": 7, "early_stopping": "accuracy(patience=2)"}
    whole = train_run(experiment_of(**values), None)
    for last in (1, 3, 4):

        def stop(run: RunState, last: int = last) -> None:
            if run.round == last:
                raise Killed

        with pytest.raises(Killed):
            train_run(experiment_of(**values), RunFolder(tmp_path / str(last)), callbacks=[AfterRound(stop)])
        again = go_on(tmp_path / str(last))
        assert again.experiment.server.round == 4 and again.digest == whole.digest


def test_early_stopping_is_refused_where_it_cannot_act() -> None:
    bare = tiny_federation()
    bare = replace(bare, clients=tuple(replace(client, validation=None) for client in bare.clients))
    with pytest.raises(DataError, match=r"--early-stopping .*validation data, and 3 of 3 clients"):
        Experiment(Settings(early_stopping="accuracy(patience=2)"), bare, model=tiny_net())
    for wrong in ("accuracy", "accuracy(patience=0)", "acuracy(patience=2)"):
        with pytest.raises(SettingError, match="early_stopping"):
            Settings(early_stopping=wrong)
