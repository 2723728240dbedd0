"""The primary metric, and the warning about models that have learned nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed
from helpers.command_line import Command
from helpers.report_page import words
from polyfed.core.data_types import ArrayExamples, DataSet, Domain
from polyfed.errors import SettingError
from polyfed.runs.scores import headline_by_scores, warnings
from polyfed.studies.report.html import render
from polyfed.tasks.classification import Scores
from polyfed.tasks.known import task_of_record
from polyfed.tasks.metrics import COUNTS, unevenness

SENTENCE = "no better than always predicting the most frequent class"


def scored(answers: list[int], labels: list[int], classes: int = 3) -> dict[str, Any]:
    scores = Scores(classes)
    scores.add(torch.eye(classes)[answers], torch.tensor(labels))
    return scores.results()


SKEWED = [0] * 24 + [1] * 3 + [2] * 3


def no_better(numbers: dict[str, Any]) -> bool:
    return task_of_record(numbers).no_better(numbers)


def test_always_one_answer_is_no_better_and_anything_learnt_is() -> None:
    constant = scored([0] * 30, SKEWED)
    assert constant["accuracy"] == 0.8 and constant["balanced_accuracy"] == pytest.approx(1 / 3)
    assert no_better(constant)
    assert not no_better(scored(SKEWED, SKEWED))
    # Below the frequency of the most frequent class, but the rare classes were learned.
    assert not no_better(scored([1] * 8 + [0] * 16 + [1] * 3 + [2] * 3, SKEWED))
    assert not no_better(scored([0, 0], [0, 0])), "a test set of one class cannot say"
    assert not no_better({"accuracy": 0.1, "count": 10}), "scores of before counts were kept"


def test_the_rule_for_runs_that_record_no_metric() -> None:
    assert unevenness([24, 3, 3]) == 8.0 and unevenness([5, 0, 5]) == 1.0 and unevenness([7]) == unevenness([]) == 1.0
    uneven, even = {("unseen", "d"): scored([0] * 30, SKEWED)}, {("seen", "a"): scored([0, 1, 2], [0, 1, 2])}
    assert headline_by_scores("auto", even).measure == "accuracy"
    chosen = headline_by_scores("auto", {**even, **uneven})
    assert chosen.measure == "balanced_accuracy" and "In d the most frequent class has 8.0 times the test images" in chosen.reason
    assert headline_by_scores("accuracy", uneven).measure == "accuracy"
    assert headline_by_scores("auto", {("seen", "a"): {"accuracy": 0.5, "count": 4}}).measure == "accuracy"
    assert SENTENCE in warnings(uneven)[0] and "unseen d: accuracy 80.0 %, baseline 80.0 %" in warnings(uneven)[0]
    assert warnings(even) == []


@pytest.fixture(scope="module")
def hospitals() -> DataSet:
    """Identical images, 24 of 30 of one class: a model can only learn which class is frequent."""

    def part(copies: int) -> ArrayExamples:
        labels = torch.tensor(SKEWED * copies)
        return ArrayExamples(torch.full((len(labels), 3, 16, 16), 128, dtype=torch.uint8), labels)

    domains = tuple(Domain(f"hospital_{letter}", part(2), part(1)) for letter in "abd")
    return DataSet("hospitals", ("benign", "melanoma", "naevus"), domains)


@pytest.fixture(scope="module")
def run(hospitals: DataSet, tmp_path_factory: pytest.TempPathFactory) -> polyfed.Result:
    out = tmp_path_factory.mktemp("hospitals") / "run"
    return polyfed.run(hospitals, rounds=2, unseen="hospital_d", evaluate_every=1, lr=0.5, out=out)


def test_a_result_says_it_first(run: polyfed.Result) -> None:
    assert run.accuracy["unseen"] == {"hospital_d": 0.8} and run.headline.measure == "balanced_accuracy"
    assert repr(run).startswith("fedavg is " + SENTENCE) and run._repr_html_().startswith("<p><b>fedavg is " + SENTENCE)
    summary = run.summary()
    assert next(iter(summary)) == "warning" and SENTENCE in summary["warning"]
    assert summary["headline"]["unseen"]["hospital_d"] == pytest.approx(1 / 3, abs=1e-6)
    assert summary["majority_rate"]["unseen"] == {"hospital_d": 0.8} and run.classes == ("benign", "melanoma", "naevus")
    assert run.words.startswith("balanced accuracy: mean of 2 seen domains 33.3 %, unseen hospital_d 33.3 %")
    assert run.table("macro_f1")["unseen"]["hospital_d"] == pytest.approx(2 * 24 / 54 / 3)
    with pytest.raises(SettingError, match="Unknown metric 'f1'"):
        run.table("f1")


def test_the_report_says_it_first(run: polyfed.Result) -> None:
    assert run.path is not None
    page = words(render([run.path]))
    first, lead = page.index(SENTENCE), page.index("fedavg reaches 33.3 %")
    assert first < lead and "balanced accuracy" in page


def test_every_round_has_counts_and_the_last_the_matrix(run: polyfed.Result) -> None:
    lines = [json.loads(text) for text in (Path(str(run.path)) / "metrics.jsonl").read_text().splitlines()]
    scores = [line for line in lines if "accuracy" in line]
    assert len(scores) == 6
    for line in scores:
        assert all(sum(line[key]) in (line["count"], line["right"]) for key in COUNTS)
        assert {"balanced_accuracy", "macro_f1", "majority_rate", "calibration_error"} <= set(line)
        assert ("confusion" in line) == ("auroc" in line) == (line["round"] == 2)


def test_answers_of_the_last_evaluation_agree_with_its_scores(run: polyfed.Result) -> None:
    again = polyfed.open_run(str(run.path), notify=lambda _: None)
    assert set(run.answers) == {
        ("seen", "hospital_a", "hospital_a"),
        ("seen", "hospital_b", "hospital_b"),
        ("unseen", "newcomer", "hospital_d"),
    }
    for row in run.rows:
        found = run.answers[row.view, row.client, row.domain]
        assert int((found["answers"] == found["labels"]).sum()) == row.numbers["right"]
        assert np.bincount(found["labels"], minlength=3).tolist() == row.numbers["class_counts"]
    assert set(again.answers) == set(run.answers)


def test_the_terminal_says_it_first(hospitals: DataSet, tmp_path: Path, polyfed: Command) -> None:
    from PIL import Image

    for domain in hospitals.domains:
        x, y = domain.train.batch(slice(0, 60))
        for place, (image, label) in enumerate(zip(x, y, strict=True)):
            folder = tmp_path / "data" / domain.name / hospitals.classes[int(label)]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{place}.png")
    ended = polyfed("run", str(tmp_path / "data"), "--rounds", "2", "--unseen", "hospital_d", "--json", "--lr", "0.5")
    assert ended.out.startswith("Warning: fedavg is no better than always predicting the most")
    assert "most frequent class %" in ended.out and "balanced accuracy %" in ended.out
    found = json.loads(ended.out.splitlines()[-1])
    assert next(iter(found)) == "warning" and found["metric"] == "balanced_accuracy"
    assert "In hospital_" in found["metric_reason"]
    assert "Classes are uneven, so balanced accuracy is the primary metric." in ended.out
    chosen = polyfed("run", str(tmp_path / "data"), "--rounds", "2", "--metric", "accuracy", "--lr", "0.5")
    assert chosen.out.startswith("Warning: fedavg is no better") and "balanced accuracy %" not in chosen.out
    assert "uneven" not in chosen.out
