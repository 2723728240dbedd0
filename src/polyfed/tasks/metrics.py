"""Metrics of all tasks: their names, their formulas, and pooling of the scores of several clients.

All metrics except the AUROC are computed from counts, so clients send counts per class and no predictions. The counts of several clients are
summed (``pooled``). The formulas are tested against scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_CLASSES = 200
"""Maximum number of classes for which a confusion matrix is kept at the end of a run."""
COUNTS = ("class_counts", "class_right", "class_answers")
"""Per class: test examples, correct predictions, and predictions."""
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
"""Display names of all metrics. Each task has some of them (``Task.measures``)."""
SMALLER_IS_BETTER = ("calibration_error", "mean_absolute_error", "root_mean_squared_error")
IN_UNITS = ("mean_absolute_error", "root_mean_squared_error")
"""Metrics in the units of the targets. The others are fractions, shown in percent."""
IN_DETAIL = ("auroc",)
"""Metrics that are computed only if scores are requested in detail."""
SUMMED = ("count", "right", "exact", "pixels")
"""Numbers of a score record that are summed over clients."""
NEITHER_IS_BETTER = ("confidence_when_right", "confidence_when_wrong")


def area_under_roc(scores: Tensor, positive: Tensor) -> float:
    """Return the fraction of (positive, negative) pairs that the scores rank correctly; ties count half."""
    values, places = torch.unique(scores, return_inverse=True)
    of_positive = torch.bincount(places[positive], minlength=len(values)).to(torch.float64)
    of_negative = torch.bincount(places[~positive], minlength=len(values)).to(torch.float64)
    below = of_negative.cumsum(0) - of_negative
    return float((of_positive * (below + of_negative / 2)).sum() / (of_positive.sum() * of_negative.sum()))


def unevenness(class_counts: Sequence[float]) -> float:
    """Return the size of the largest class divided by the mean size of the others; 1 if there is only one class.

    >>> unevenness([24, 3, 3]), unevenness([10, 10])
    (8.0, 1.0)
    """
    occurring = [count for count in class_counts if count]
    if len(occurring) < 2:
        return 1.0
    others = (sum(occurring) - max(occurring)) / (len(occurring) - 1)
    return max(occurring) / others


def balanced_accuracy(class_counts: Sequence[float], class_right: Sequence[float]) -> float:
    """Return the mean recall over the classes that occur."""
    recalls = [right / count for right, count in zip(class_right, class_counts, strict=True) if count]
    return ratio(sum(recalls), len(recalls))


def macro_f1(class_counts: Sequence[float], class_right: Sequence[float], class_answers: Sequence[float]) -> float:
    """Return the mean F1 over the classes that occur or were predicted."""
    triples = zip(class_counts, class_right, class_answers, strict=True)
    scores = [2 * right / (count + answers) for count, right, answers in triples if count + answers]
    return ratio(sum(scores), len(scores))


def majority_rate(class_counts: Sequence[float]) -> float:
    """Return the fraction of the most frequent class, which is the accuracy of always predicting it."""
    return ratio(max(class_counts, default=0), sum(class_counts))


def standard_error(numbers: Mapping[str, Any], measure: str) -> float:
    """Return the standard error from the size of the test set, for accuracy and balanced accuracy; NaN for other metrics."""
    if measure == "accuracy":
        return float(numbers.get("standard_error", math.nan))
    if measure == "balanced_accuracy" and "class_counts" in numbers:
        # Add one correct and one wrong prediction: a recall of 0 or 1 from three images is uncertain.
        pairs = [((r + 1) / (n + 2), n) for r, n in zip(numbers["class_right"], numbers["class_counts"], strict=True) if n]
        return math.sqrt(sum(p * (1 - p) / n for p, n in pairs)) / len(pairs) if pairs else math.nan
    return math.nan


def pooled(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the scores of several clients on one domain: sum the counts, average the rest by number of test examples."""
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
    """Return the mean of several clients' scores, weighted by the number of test examples."""
    largest = max(numbers["count"] for numbers in many) or 1
    # Relative to the largest: for test sets of equal size this is bit-identical to the plain mean.
    weights = [numbers["count"] / largest for numbers in many]
    total = sum(weight * float(numbers[measure]) for weight, numbers in zip(weights, many, strict=True) if weight)
    return total / sum(weights) if sum(weights) else math.nan


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``; NaN if ``whole`` is 0."""
    return part / whole if whole else math.nan
