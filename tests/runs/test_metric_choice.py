"""The primary metric is chosen from training labels before round 1, and is used for selection and in all tables."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from helpers.report_page import words
from polyfed.core.data_types import ArrayExamples, ClientData, DataSet, Domain, Federation
from polyfed.core.evaluation import Row
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.settings import Settings
from polyfed.studies.compare.compare import LEAVE_ONE_OUT, ComparedRuns
from polyfed.studies.report.comparison import compare_runs
from polyfed.studies.report.exports import write_tables
from polyfed.studies.report.html import render
from polyfed.studies.report.live import look_at
from polyfed.studies.sweep.search import Sweep
from polyfed.studies.sweep.space import Axis
from polyfed.tasks.classification import Scores
from polyfed.testing import TinyNet

UNEVEN, EVEN = [0] * 8 + [1] * 2, [0] * 5 + [1] * 5
ANSWERS = {
    1: [0] * 10,  # accuracy 8/10, recalls 8/8 and 0/2: balanced 0.5
    2: [0] * 5 + [1] * 5,  # accuracy 7/10, recalls 5/8 and 2/2: balanced 0.8125, the best
    3: [0] * 9 + [1],  # accuracy 9/10, the best; recalls 8/8 and 1/2: balanced 0.75
    4: [1] * 10,  # accuracy 2/10, balanced 0.5
}


def part(labels: list[int]) -> ArrayExamples:
    stream = torch.Generator().manual_seed(len(labels))
    return ArrayExamples(torch.randint(0, 256, (len(labels), 3, 16, 16), dtype=torch.uint8, generator=stream), torch.tensor(labels))


def net() -> TinyNet:
    torch.manual_seed(3)
    return TinyNet(2)


def data_set(*training: list[int], test: list[int] = EVEN) -> DataSet:
    domains = tuple(Domain(f"d{number}", part(labels), part(test), part(UNEVEN)) for number, labels in enumerate(training))
    return DataSet("uneven", ("common", "rare"), domains, source="made in the test")


def scored(answers: list[int]) -> Scores:
    scores = Scores(2, in_detail=True)
    scores.add(torch.eye(2)[answers], torch.tensor(UNEVEN))
    return scores


def run(data: Any, folder: Path | None = None, method: str = "fedavg", **changes: Any) -> Any:
    values = {"rounds": 4, "batch_size": 5, "lr": 0.01} | changes
    return train_run(Experiment(Settings(**values), data, method, net()), None if folder is None else RunFolder(folder))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the validation predictions by round, or by learning rate if it is 0.5 or 0.02."""
    original = Experiment.evaluate

    def evaluate(self: Experiment, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> list[Row]:
        if split != "validation":
            return original(self, split, newcomer, in_detail)
        number = {0.5: 3, 0.02: 2}.get(self.settings.lr, self.server.round)
        return [Row("validation", client, client, scored(ANSWERS[number]).results()) for client in self.server.client_ids]

    monkeypatch.setattr(Experiment, "evaluate", evaluate)


def selected(folder: Path) -> set[int]:
    return {line["selected_round"] for line in RunFolder(folder).metrics() if "selected_round" in line}


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize(
    ("training", "metric", "best"),
    [(UNEVEN, "auto", 2), (EVEN, "auto", 3), (UNEVEN, "accuracy", 3), (EVEN, "balanced_accuracy", 2)],
)
def test_the_best_round_is_chosen_by_the_metric_of_the_tables(tmp_path: Path, training: list[int], metric: str, best: int) -> None:
    data = data_set(training, training)
    result = run(data, tmp_path / "run", selection="best_validation", metric=metric)
    assert selected(tmp_path / "run") == {best}
    assert result.digest == run(data, rounds=best).digest
    assert result.headline.measure == ("balanced_accuracy" if best == 2 else "accuracy")


def test_an_area_under_the_curve_can_choose_the_round(tmp_path: Path) -> None:
    result = run(data_set(EVEN, EVEN), tmp_path / "run", selection="best_validation", metric="auroc", rounds=2)
    lines = [line for line in RunFolder(tmp_path / "run").metrics() if line["view"] == "validation"]
    means = [sum(line["auroc"] for line in lines if line["round"] == number) / 2 for number in (1, 2)]
    assert selected(tmp_path / "run") == {1 + (means[1] > means[0])} and result.headline.measure == "auroc"


@pytest.mark.parametrize(("training", "best"), [(UNEVEN, 2), (EVEN, 3)])
def test_models_before_averaging_are_compared_by_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: list[int], best: int
) -> None:
    order: Iterator[int] = iter([number for number in ANSWERS for _ in range(2)])  # two clients in each round
    original = polyfed.core.client.score

    def score(bench: Any, examples: Any, in_detail: bool = False) -> Any:
        is_validation = examples.labels.tolist() == UNEVEN and bench.settings.selection == "best_local_validation"
        return scored(ANSWERS[next(order)]) if is_validation else original(bench, examples, in_detail)

    monkeypatch.setattr("polyfed.core.client.score", score)
    run(data_set(training, training), tmp_path / "run", selection="best_local_validation")
    assert selected(tmp_path / "run") == {best}
    name = "balanced_accuracy" if best == 2 else "accuracy"
    local = [line[name] for line in RunFolder(tmp_path / "run").metrics() if line["view"] == "local_validation"]
    assert local[::2] == ([0.5, 0.8125, 0.75, 0.5] if best == 2 else [0.8, 0.7, 0.9, 0.2])


def test_test_labels_have_no_say() -> None:
    found = run(data_set(UNEVEN, test=EVEN), rounds=1).headline
    assert (
        found.measure == "balanced_accuracy" and "In d0 the most frequent class has 4.0 times the training images" in found.reason
    )
    found = run(data_set(EVEN, test=UNEVEN), rounds=1).headline
    assert found.measure == "accuracy" and found.reason.startswith("No training set has a class with more than three times")


def test_labels_count_by_domain_whoever_holds_them_and_methods_that_pool_choose_alike() -> None:
    zeros, ones = part([0] * 10), part([1] * 5 + [0])
    clients = tuple(ClientData(name, ("one",), train, {"one": part(EVEN)}) for name, train in (("a", zeros), ("b", ones)))
    split = Federation("split", ("common", "rare"), clients)
    assert run(split, rounds=1).headline.measure == "accuracy", "11 and 5 of the domain, although b holds 1 and 5"
    for method in ("fedavg", "central"):
        # Pooled, the labels are 16 and 14.
        assert run(data_set(UNEVEN, [0] * 8 + [1] * 12), rounds=1, method=method).headline.measure == "balanced_accuracy"


def test_the_choice_is_recorded_and_everything_that_opens_the_run_reads_it(tmp_path: Path) -> None:
    data, folder = data_set(UNEVEN, UNEVEN, test=EVEN), tmp_path / "run"
    result = run(data, folder, rounds=1)
    written = tomllib.loads((folder / "run.toml").read_text())["metric"]
    assert written == {"name": "balanced_accuracy", "reason": result.headline.reason}
    opened = polyfed.open_run(folder, model=net(), notify=lambda _: None)
    assert opened.headline == result.headline == resume(folder, data=data, how=Reopening(model=net())).headline
    assert look_at(folder).measure == "balanced_accuracy"
    assert "Classes are uneven, so balanced accuracy is the primary metric" in words(render([folder]))
    write_tables([folder], tmp_path / "table.tex", "latex")
    assert r"\caption{Balanced accuracy in" in (tmp_path / "table.tex").read_text()


def test_a_folder_without_a_recorded_metric_keeps_the_rule_it_was_made_by(tmp_path: Path) -> None:
    for name, test, measure in (("even", EVEN, "accuracy"), ("uneven", UNEVEN, "balanced_accuracy")):
        experiment = Experiment(Settings(rounds=1, batch_size=5), data_set(UNEVEN, test=test), "fedavg", net())
        experiment.set_headline(None)
        assert experiment.bench.measure == "accuracy", "rounds were chosen by accuracy then"
        train_run(experiment, RunFolder(tmp_path / name))
        assert "metric" not in tomllib.loads((tmp_path / name / "run.toml").read_text())
        opened = polyfed.open_run(tmp_path / name, model=net(), notify=lambda _: None)
        assert opened.headline.measure == look_at(tmp_path / name).measure == measure


def test_all_runs_of_a_comparison_have_one_metric(tmp_path: Path) -> None:
    settings = Settings(data="uneven", model="small_cnn(width=4)", rounds=1, batch_size=5, unseen_part="all")
    data = data_set(UNEVEN, EVEN, EVEN)
    found = compare_runs(ComparedRuns(settings, ["fedavg"], data=data, protocol=LEAVE_ONE_OUT, folder=tmp_path))
    recorded = {path.parent.name: tomllib.loads(path.read_text())["metric"]["name"] for path in tmp_path.glob("*/run.toml")}
    assert len(recorded) == 3 and set(recorded.values()) == {"balanced_accuracy"} and found.metric == "balanced_accuracy"


@pytest.mark.usefixtures("given")
def test_a_finished_run_is_not_reused_if_another_metric_chose_its_round(tmp_path: Path) -> None:
    data = data_set(UNEVEN, UNEVEN)

    def compared(**changes: Any) -> Any:
        values = {"data": "uneven", "model": "small_cnn(width=4)", "rounds": 3, "batch_size": 5} | changes
        return compare_runs(ComparedRuns(Settings(**values), ["fedavg"], data=data, folder=tmp_path))

    assert compared(selection="best_validation").reused == 0
    assert (
        compared(selection="best_validation").reused
        == compared(selection="best_validation", metric="balanced_accuracy").reused
        == 1
    )
    assert compared(selection="best_validation", metric="accuracy").reused == 0
    compared()
    assert compared(metric="macro_f1").reused == 1, "the last round is the same by any metric"


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize("halving", [False, True])
@pytest.mark.parametrize(("training", "winner"), [(UNEVEN, 0.02), (EVEN, 0.5)])
def test_a_search_is_won_by_the_metric_of_its_tables(tmp_path: Path, training: list[int], winner: float, halving: bool) -> None:
    settings = Settings(data="uneven", model="small_cnn(width=4)", rounds=3 if halving else 1, batch_size=5)
    # Halving keeps a third at each rung: the best of the first three by the metric.
    rates = Axis("lr", (0.5, 0.02))
    found = Sweep(settings, ["fedavg"], [rates], tmp_path, data=data_set(training, training), halving=halving)
    (one,) = found.run()
    assert one.chosen is not None and one.chosen.trial.values == {"lr": winner}
    document = json.loads((tmp_path / "sweep.json").read_text())
    by = "balanced accuracy" if winner == 0.02 else "accuracy"
    assert document["chosen_by"] == f"mean over clients of the {by} on source-validation data"
    scores = {trial["values"]["lr"]: trial["validation"] for trial in document["methods"][0]["trials"]}
    assert scores[winner] == (0.8125 if winner == 0.02 else 0.9)
    assert one.outcomes[0]["metric"] == found.metric == by.replace(" ", "_")
    again = Sweep(replace(settings), ["fedavg"], [rates], tmp_path, data=data_set(training, training), halving=halving)
    assert again.run()[0].chosen == one.chosen
