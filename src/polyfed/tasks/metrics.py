"""The metrics of all tasks: their names, their formulas from counts, and the scores of several clients pooled.

Everything but the AUROC follows from counts, so clients send counts by class and no answers for single images. The counts of several
clients add up (``pooled``). The formulas are tested against scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_CLASSES = 200
"""Up to this number of classes a confusion matrix is kept at the end of a run."""
COUNTS = ("class_counts", "class_right", "class_answers")
"""Test images of each class, those of them that were right, and how often each class was the answer."""
MEASURES: Mapping[str, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC",
    "mean_iou": "mean IoU",
    "exact_match": "exact match",
    "micro_f1": "micro F1",
    "r2": "R²",
    "mean_absolute_error": "mean absolute error",
    "root_mean_squared_error": "root mean squared error",
    "calibration_error": "calibration error",
    "confidence_when_right": "confidence when right",
    "confidence_when_wrong": "confidence when wrong",
}
"""What can be shown of scores, and its words; each task has some of them (``Task.measures``)."""
SMALLER_IS_BETTER = ("calibration_error", "mean_absolute_error", "root_mean_squared_error")
IN_UNITS = ("mean_absolute_error", "root_mean_squared_error")
"""Measures in the units of the targets; the others are shares, and shown in percent."""
IN_DETAIL = ("auroc",)
"""Metrics that are computed only if scores are requested in detail."""
SUMMED = ("count", "right", "exact", "pixels")
"""Numbers of a score that add up over clients."""
NEITHER_IS_BETTER = ("confidence_when_right", "confidence_when_wrong")


def area_under_roc(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs of a positive and a negative example that the scores put in the right order; ties count half."""
    values, places = torch.unique(scores, return_inverse=True)
    of_positive = torch.bincount(places[positive], minlength=len(values)).to(torch.float64)
    of_negative = torch.bincount(places[~positive], minlength=len(values)).to(torch.float64)
    below = of_negative.cumsum(0) - of_negative
    return float((of_positive * (below + of_negative / 2)).sum() / (of_positive.sum() * of_negative.sum()))


def unevenness(class_counts: Sequence[float]) -> float:
    """How many times the images of the other classes, on average, the most frequent class has; 1 where there is but one class.

    >>> unevenness([24, 3, 3]), unevenness([10, 10])
    (8.0, 1.0)
    """
    occurring = [count for count in class_counts if count]
    if len(occurring) < 2:
        return 1.0
    others = (sum(occurring) - max(occurring)) / (len(occurring) - 1)
    return max(occurring) / others


def balanced_accuracy(class_counts: Sequence[float], class_right: Sequence[float]) -> float:
    """Mean recall over the classes that occur."""
    recalls = [right / count for right, count in zip(class_right, class_counts, strict=True) if count]
    return ratio(sum(recalls), len(recalls))


def macro_f1(class_counts: Sequence[float], class_right: Sequence[float], class_answers: Sequence[float]) -> float:
    """Mean F1 over the classes that occur or were answered."""
    triples = zip(class_counts, class_right, class_answers, strict=True)
    scores = [2 * right / (count + answers) for count, right, answers in triples if count + answers]
    return ratio(sum(scores), len(scores))


def majority_rate(class_counts: Sequence[float]) -> float:
    """The share of the most frequent class: the accuracy of always answering it."""
    return ratio(max(class_counts, default=0), sum(class_counts))


def standard_error(numbers: Mapping[str, Any], measure: str) -> float:
    """The standard error of a measure from the size of the test set, as far as there is a simple one: of accuracy and balanced accuracy."""
    if measure == "accuracy":
        return float(numbers.get("standard_error", math.nan))
    if measure == "balanced_accuracy" and "class_counts" in numbers:
        # One right and one wrong answer more: a recall of 0 or 1 from three images is not sure.
        pairs = [((r + 1) / (n + 2), n) for r, n in zip(numbers["class_right"], numbers["class_counts"], strict=True) if n]
        return math.sqrt(sum(p * (1 - p) / n for p, n in pairs)) / len(pairs) if pairs else math.nan
    return math.nan


def pooled(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of several clients on one domain as those of one: counts add up, the rest is a mean by the number of test examples."""
    if len(many) == 1:
        return dict(many[0])
    shared = [key for key in many[0] if all(key in numbers for numbers in many)]
    found: dict[str, Any] = {}
    for key in shared:
        if key in SUMMED:
            found[key] = sum(numbers[key] for numbers in many)
        elif isinstance(many[0][key], list):
            found[key] = _sum([numbers[key] for numbers in many])
        elif isinstance(many[0][key], int | float) and "count" in shared:
            found[key] = over_examples(many, key)
    if all(key in found for key in COUNTS):
        counts = {key: found[key] for key in COUNTS}
        found["balanced_accuracy"] = balanced_accuracy(found["class_counts"], found["class_right"])
        found["macro_f1"], found["majority_rate"] = macro_f1(**counts), majority_rate(found["class_counts"])
    return found


def _sum(many: Sequence[list[Any]]) -> list[Any]:
    return [_sum(items) if isinstance(items[0], list) else sum(items) for items in zip(*many, strict=True)]


def over_examples(many: Sequence[Mapping[str, float]], measure: str) -> float:
    """The mean of several clients' scores on one domain, each by the number of its test examples."""
    largest = max(numbers["count"] for numbers in many) or 1
    # Shares of the largest: with tests of one size this is the plain mean to the bit.
    weights = [numbers["count"] / largest for numbers in many]
    total = sum(weight * float(numbers[measure]) for weight, numbers in zip(weights, many, strict=True) if weight)
    return total / sum(weights) if sum(weights) else math.nan


def ratio(part: float, whole: float) -> float:
    """A part of a whole; NaN where there is no whole."""
    return part / whole if whole else math.nan
