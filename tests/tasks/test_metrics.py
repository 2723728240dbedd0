"""Metrics against scikit-learn and against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, confusion_matrix, f1_score, recall_score, roc_auc_score

from polyfed.errors import DataError, NotFinite
from polyfed.tasks.classification import Scores, confidence_bins
from polyfed.tasks.known import CLASSIFICATION
from polyfed.tasks.metrics import COUNTS, pooled, standard_error


def predictions(count: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator)
    return logits.softmax(dim=1), torch.randint(classes, (count,), generator=generator)


def measure(probabilities: torch.Tensor, labels: torch.Tensor, in_detail: bool = False) -> dict[str, Any]:
    scores = Scores(probabilities.shape[1], in_detail=in_detail)
    scores.add(probabilities, labels)
    return scores.results()


def calibration_error_in_numpy(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    error = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


def test_by_hand() -> None:
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.25, 0.35, 0.4]], dtype=torch.float64)
    results = measure(probabilities, torch.tensor([0, 1, 1, 0]))
    # Answers 0, 0, 1, 2: the first and third are right. Class 2 does not occur, so recall is over classes 0 and 1: 1/2 each.
    assert results["accuracy"] == 0.5
    assert results["balanced_accuracy"] == 0.5
    assert results["standard_error"] == pytest.approx(0.25)
    assert results["confidence_when_right"] == pytest.approx(0.75)
    assert results["confidence_when_wrong"] == pytest.approx(0.55)
    # Four bins with one example each: 0.1 + 0.7 + 0.4 + 0.4 over 4.
    assert results["calibration_error"] == pytest.approx(0.4)
    assert (results["count"], results["right"]) == (4, 2)


def test_balanced_accuracy_differs_from_accuracy_when_one_class_rules() -> None:
    probabilities = torch.tensor([[0.8, 0.2]]).repeat(10, 1)
    results = measure(probabilities, torch.tensor([0] * 9 + [1]))
    assert results["accuracy"] == 0.9
    assert results["balanced_accuracy"] == 0.5


@pytest.mark.parametrize(("count", "classes", "seed"), [(50, 3, 0), (400, 10, 1), (7, 20, 2)])
def test_against_scikit_learn_and_numpy(count: int, classes: int, seed: int) -> None:
    probabilities, labels = predictions(count, classes, seed)
    scores = Scores(classes)
    scores.add(probabilities, labels)
    found = scores.results()
    answers, truth = probabilities.argmax(dim=1).numpy(), labels.numpy()
    assert found["accuracy"] == scores.main == pytest.approx(accuracy_score(truth, answers))
    recalls = recall_score(truth, answers, labels=np.unique(truth), average="macro", zero_division=0)
    assert found["balanced_accuracy"] == pytest.approx(recalls)
    assert scores.confusion.tolist() == confusion_matrix(truth, answers, labels=range(classes)).tolist()
    assert found["calibration_error"] == pytest.approx(calibration_error_in_numpy(probabilities.double().numpy(), truth))


@given(count=st.integers(0, 40), cut=st.integers(0, 40), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_batches_add_up(count: int, cut: int, seed: int) -> None:
    probabilities, labels = predictions(count, 4, seed)
    whole, parts = Scores(4), Scores(4)
    whole.add(probabilities, labels)
    parts.add(probabilities[:cut], labels[:cut])
    parts.add(probabilities[cut:], labels[cut:])
    one, other = whole.results(), parts.results()
    assert {key: one.pop(key) for key in COUNTS} == {key: other.pop(key) for key in COUNTS}
    assert one == pytest.approx(other)
    assert all(isinstance(value, float | int) for key, value in whole.results().items() if key not in COUNTS)


def test_a_mean_over_nothing_is_left_out() -> None:
    assert Scores(3).results() == {"count": 0, "right": 0, **{key: [0, 0, 0] for key in COUNTS}}
    assert "confidence_when_wrong" not in measure(torch.eye(3), torch.arange(3))


def test_a_full_bin_keeps_its_upper_bound() -> None:
    assert confidence_bins(torch.tensor([0.5, 0.75, 1.0]), bins=2).tolist() == [0, 1, 1]


def test_what_does_not_fit_is_refused() -> None:
    scores = Scores(2)
    with pytest.raises(DataError, match=r"shape \(1, 3\)"):
        scores.add(torch.full((1, 3), 1 / 3), torch.tensor([0]))
    with pytest.raises(DataError, match="from 0 to 1"):
        scores.add(torch.tensor([[0.5, 0.5]]), torch.tensor([2]))
    with pytest.raises(DataError, match="not logits"):
        scores.add(torch.tensor([[3.0, -2.0]]), torch.tensor([0]))
    with pytest.raises(NotFinite, match="diverged"):
        scores.add(torch.tensor([[math.nan, 0.5]]), torch.tensor([0]))
    assert scores.results()["count"] == 0


@pytest.mark.parametrize(("count", "classes", "seed"), [(60, 2, 3), (50, 3, 0), (400, 10, 1)])
def test_f1_and_auroc_against_scikit_learn(count: int, classes: int, seed: int) -> None:
    probabilities, labels = predictions(count, classes, seed)
    probabilities = (probabilities * 20).round() / 20  # many ties
    probabilities /= probabilities.sum(dim=1, keepdim=True)
    found = measure(probabilities, labels, in_detail=True)
    answers, truth = probabilities.argmax(dim=1).numpy(), labels.numpy()
    assert found["macro_f1"] == pytest.approx(f1_score(truth, answers, average="macro", zero_division=0))
    areas = [roc_auc_score(truth == c, probabilities[:, c].numpy()) for c in np.unique(truth)]
    assert found["auroc"] == pytest.approx(np.mean(areas))
    assert found["confusion"] == confusion_matrix(truth, answers, labels=range(classes)).tolist()
    assert found["majority_rate"] == np.bincount(truth).max() / count
    assert "auroc" not in measure(probabilities, labels) and "confusion" not in measure(probabilities, labels)


def test_scores_of_several_clients_are_those_of_all_their_images() -> None:
    probabilities, labels = predictions(90, 4, 5)
    labels[:50] = 0  # the first client has one class only
    whole = measure(probabilities, labels)
    parts = [measure(probabilities[:50], labels[:50]), measure(probabilities[50:], labels[50:])]
    found = pooled(parts)
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "majority_rate"):
        assert found[name] == pytest.approx(whole[name]), name
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels.numpy(), probabilities.argmax(1).numpy()))
    assert [found[key] for key in COUNTS] == [whole[key] for key in COUNTS]
    old = pooled([{"accuracy": 0.5, "count": 10}, {"accuracy": 1.0, "count": 30}])  # of a file of before
    assert old["accuracy"] == pytest.approx(0.875)


def test_error_of_the_balanced_accuracy_is_not_zero_for_three_images() -> None:
    found = measure(torch.tensor([[0.8, 0.1, 0.1]]).repeat(30, 1), torch.tensor([0] * 24 + [1] * 3 + [2] * 3))
    assert found["balanced_accuracy"] == pytest.approx(1 / 3) and standard_error(found, "balanced_accuracy") > 0.1
    assert standard_error(found, "accuracy") == found["standard_error"] and math.isnan(standard_error(found, "auroc"))


def test_counts_that_do_not_add_up_are_refused() -> None:
    good = measure(*predictions(20, 3, 0), in_detail=True)

    def problem(**changes: Any) -> str:
        return CLASSIFICATION.problem_with_record({**good, **changes})

    assert problem() == ""
    assert CLASSIFICATION.problem_with_record({key: good[key] for key in ("accuracy", "count", "right")}) == ""  # an older client
    assert "do not add up" in problem(class_counts=[20, 1, 0])
    assert "different numbers of classes" in problem(class_right=[1, 2])
    assert "confusion" in problem(confusion=[[20, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert "confusion" in problem(confusion=[])
    assert problem(class_answers="many") and problem(class_counts=[math.nan] * 3) and problem(confusion=[[1], 2])
    without = {key: value for key, value in good.items() if key != "class_right"}
    assert "no 'class_right'" in CLASSIFICATION.problem_with_record(without)
