"""The metric of a run over nodes: chosen from the class counts that they report, and sent to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers.flower_fakes import TINY, TINY_MODEL, FakeGrid, described, over, tiny_data, virtual_nodes
from polyfed.flower.join.guarded_executor import uniform_counts
from polyfed.flower.node.node import measure_in
from polyfed.flower.server.federation import federation_of
from polyfed.flower.server_app import as_reported
from polyfed.flower.wire.message import BadMessage
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings
from polyfed.tasks.known import CLASSIFICATION
from polyfed.testing import TinyNet


@pytest.mark.parametrize("metric", ["auto", "balanced_accuracy", "auroc"])
def test_nodes_score_what_they_trained_by_the_metric_of_the_run(tmp_path: Path, metric: str) -> None:
    settings = Settings(
        data=TINY, model=TINY_MODEL, rounds=3, batch_size=4, lr=0.3, selection="best_local_validation", metric=metric
    ).trusted()
    lines = {}
    with tiny_data():
        grid = FakeGrid(settings, tmp_path, virtual_nodes(3))
        for name, experiment in (("nodes", over(grid, settings)), ("here", Experiment(settings))):
            train_run(experiment, RunFolder(tmp_path / name))
            found = RunFolder(tmp_path / name).metrics()
            lines[name] = [line for line in found if line["view"] == "local_validation" or "selected_round" in line]
    assert lines["nodes"] == lines["here"] and len(lines["here"]) == 9 + 3
    assert all(("accuracy" if metric == "auto" else metric) in line for line in lines["here"])


def test_the_server_chooses_from_reported_counts_and_says_so() -> None:
    node = dataclasses.replace(described("north", "north"), samples=44)

    def chosen(counts: tuple[int, ...], metric: str = "auto") -> tuple[str, str]:
        federation = federation_of([dataclasses.replace(node, class_counts=counts)])
        found = as_reported(Experiment(Settings(metric=metric), federation, model=TinyNet(2)))
        assert found is not None
        return found.measure, found.reason

    measure, reason = chosen((40, 4))
    assert measure == "balanced_accuracy" and "10.0 times" in reason and "The nodes report these class counts" in reason
    measure, reason = chosen(tuple(uniform_counts([40, 4])))
    assert measure == "accuracy" and "a node whose policy withholds them reports a uniform distribution" in reason
    assert chosen((40, 4), "accuracy") == ("accuracy", "--metric accuracy was specified.")


def test_a_metric_that_the_task_lacks_is_refused_by_the_node() -> None:
    assert measure_in({}, CLASSIFICATION) == "accuracy" and measure_in({"measure": "macro_f1"}, CLASSIFICATION) == "macro_f1"
    with pytest.raises(BadMessage, match="the server selects rounds by r2, which is not a metric of classification"):
        measure_in({"measure": "r2"}, CLASSIFICATION)
