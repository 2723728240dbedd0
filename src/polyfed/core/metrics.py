"""How good predictions are: accuracy, balanced accuracy, macro F1, AUROC, calibration, and confidence when right and when wrong.

Everything but the AUROC follows from counts, so clients send counts by class and no answers for single images. The counts of several
clients add up (``pooled``). The formulas are tested against scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import DataError, NotFinite

BINS = 15
MOST_CLASSES = 200
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


@dataclass(eq=False)
class Scores:
    """Sums over test examples from which all measures follow; batches add up.

    >>> scores = Scores(classes=2)
    >>> scores.add(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    >>> scores.results()["accuracy"]
    0.5

    Attributes:
        classes: Number of classes.
        bins: Number of confidence bins of equal width for the calibration error.
        confusion: How often class i was taken for class j, int64, shape (classes, classes).
        bin_counts: Examples by confidence bin, int64, shape (bins,).
        bin_right: Those of them that were right, int64, shape (bins,).
        bin_confidence: Sum of confidence by bin, float64, shape (bins,).
        confidence_right: Sum of the confidence of right answers.
        confidence_wrong: Sum of the confidence of wrong answers.
        in_detail: Keep the answer for each example, and, for the AUROC, all probabilities (up to 200 classes).
    """

    classes: int
    bins: int = BINS
    in_detail: bool = False
    confusion: Tensor = field(init=False)
    bin_counts: Tensor = field(init=False)
    bin_right: Tensor = field(init=False)
    bin_confidence: Tensor = field(init=False)
    confidence_right: float = field(default=0.0, init=False)
    confidence_wrong: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.confusion = torch.zeros(self.classes, self.classes, dtype=torch.int64)
        self.bin_counts = torch.zeros(self.bins, dtype=torch.int64)
        self.bin_right = torch.zeros(self.bins, dtype=torch.int64)
        self.bin_confidence = torch.zeros(self.bins, dtype=torch.float64)
        self._labels: list[Tensor] = []
        self._answers: list[tuple[Tensor, Tensor]] = []
        self._probabilities: list[Tensor] = []

    def add(self, probabilities: Tensor, labels: Tensor) -> None:
        """Count a batch of probabilities, shape (n, classes), with its labels, shape (n,)."""
        probabilities, labels = self._checked(probabilities, labels)
        confidence, answers = probabilities.max(dim=1)
        right = answers == labels
        self.confusion += torch.bincount(labels * self.classes + answers, minlength=self.classes**2).view_as(self.confusion)
        bins = _bins(confidence, self.bins)
        self.bin_counts += torch.bincount(bins, minlength=self.bins)
        self.bin_right += torch.bincount(bins[right], minlength=self.bins)
        self.bin_confidence += torch.bincount(bins, weights=confidence, minlength=self.bins)
        self.confidence_right += float(confidence[right].sum())
        self.confidence_wrong += float(confidence[~right].sum())
        if self.in_detail:
            self._labels.append(labels)
            self._answers.append((answers, confidence))
            if self.classes <= MOST_CLASSES:
                self._probabilities.append(probabilities.to(torch.float32))

    @property
    def count(self) -> int:
        """Number of examples."""
        return int(self.confusion.sum())

    @property
    def right(self) -> int:
        """Number of right answers."""
        return int(self.confusion.trace())

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return ratio(self.right, self.count)

    @property
    def main(self) -> float:
        """Accuracy: rounds and settings are chosen by it."""
        return self.accuracy

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that occur."""
        totals = self.confusion.sum(dim=1)
        recalls = (self.confusion.diagonal() / totals.to(torch.float64))[totals > 0]
        return float(recalls.mean()) if len(recalls) else math.nan

    @property
    def auroc(self) -> float:
        """The area under the ROC curve of each class against the others, averaged over classes that occur and are not all there is.

        It is the share of pairs (an image of the class, one of another) in which the first has the higher probability; equal ones
        count half (Hand and Till 2001 write it so for two classes).
        """
        if not self._probabilities:
            return math.nan
        labels, scores = torch.cat(self._labels), torch.cat(self._probabilities)
        areas = [
            area_under_roc(scores[:, c], labels == c) for c in range(self.classes) if 0 < int((labels == c).sum()) < len(labels)
        ]
        return sum(areas) / len(areas) if areas else math.nan

    @property
    def standard_error(self) -> float:
        """Binomial standard error of the accuracy, ``sqrt(p (1 - p) / n)``."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.count) if self.count else math.nan

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean distance between accuracy and confidence, over bins by their size."""
        return ratio(float((self.bin_right - self.bin_confidence).abs().sum()), self.count)

    def answers(self) -> dict[str, Tensor]:
        """Label, answer and confidence for each example, in their order; only where scores are kept in detail."""
        columns = {
            "labels": (self._labels, torch.int32),
            "answers": ([answers for answers, _ in self._answers], torch.int32),
            "confidence": ([confidence for _, confidence in self._answers], torch.float32),
        }
        return {name: torch.cat(parts).to(kind) if parts else torch.zeros(0, dtype=kind) for name, (parts, kind) in columns.items()}

    def results(self) -> dict[str, Any]:
        """All measures as plain numbers, and counts by class. A mean over nothing (no example, no wrong answer) is left out."""
        counts = {
            "class_counts": self.confusion.sum(dim=1).tolist(),
            "class_right": self.confusion.diagonal().tolist(),
            "class_answers": self.confusion.sum(dim=0).tolist(),
        }
        found: dict[str, float | int] = {
            "accuracy": self.accuracy,
            "balanced_accuracy": self.balanced_accuracy,
            "macro_f1": macro_f1(**counts),
            "auroc": self.auroc,
            "majority_rate": majority_rate(counts["class_counts"]),
            "standard_error": self.standard_error,
            "calibration_error": self.calibration_error,
            "confidence_when_right": ratio(self.confidence_right, self.right),
            "confidence_when_wrong": ratio(self.confidence_wrong, self.count - self.right),
            "count": self.count,
            "right": self.right,
        }
        matrix = {"confusion": self.confusion.tolist()} if self.in_detail and self.classes <= MOST_CLASSES else {}
        return {name: value for name, value in found.items() if not math.isnan(value)} | counts | matrix

    def _checked(self, probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The batch on the CPU in double precision; a batch that does not fit is refused."""
        if probabilities.shape != (len(labels), self.classes):
            raise DataError(
                f"Probabilities of shape {tuple(probabilities.shape)} do not fit {len(labels)} labels and {self.classes} classes."
            )
        probabilities, labels = probabilities.detach().to("cpu", torch.float64), labels.to("cpu", torch.int64)
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= self.classes):
            raise DataError(
                f"Labels go from {int(labels.min())} to {int(labels.max())}, but the classes go from 0 to {self.classes - 1}."
            )
        if not bool(probabilities.isfinite().all()):
            raise NotFinite("Some predicted probabilities are NaN or infinite, so they cannot be scored: the model has diverged.")
        if len(labels) and (float(probabilities.min()) < 0 or float(probabilities.max()) > 1 + 1e-4):
            raise DataError(
                "Some predicted probabilities are outside 0 to 1. A method's predict returns probabilities, not logits."
            )
        return probabilities, labels


def results_of_parts(
    probabilities: Tensor, labels: Tensor, sizes: Sequence[int], classes: int, bins: int = BINS, in_detail: bool = False
) -> list[dict[str, Any]]:
    """What ``Scores.results`` says of each of several parts that lie one after the other, for all of them in a few operations.

    In detail there is a confusion matrix too, but no AUROC: clients that are scored together have few images each.
    """
    probabilities, labels = Scores(classes)._checked(probabilities, labels)
    parts = len(sizes)
    part = torch.repeat_interleave(torch.arange(parts), torch.tensor(sizes))
    confidence, answers = probabilities.max(dim=1)
    is_right = answers == labels
    count, right = torch.tensor(sizes), torch.bincount(part[is_right], minlength=parts)
    accuracy = right / count.to(torch.float64)
    totals = torch.bincount(part * classes + labels, minlength=parts * classes).view(parts, classes)
    hits = torch.bincount((part * classes + labels)[is_right], minlength=parts * classes).view(parts, classes)
    given = torch.bincount(part * classes + answers, minlength=parts * classes).view(parts, classes)
    recalls = (hits / totals.to(torch.float64)).nan_to_num(0.0).sum(dim=1)
    occurs = (totals + given) > 0
    harmonic = (2 * hits / (totals + given).to(torch.float64)).nan_to_num(0.0).sum(dim=1)
    places = part * bins + _bins(confidence, bins)
    bin_right = torch.bincount(places[is_right], minlength=parts * bins).view(parts, bins)
    bin_confidence = torch.bincount(places, weights=confidence, minlength=parts * bins).view(parts, bins)
    sure = [torch.bincount(part[which], weights=confidence[which], minlength=parts) for which in (is_right, ~is_right)]
    columns = {
        "accuracy": accuracy,
        "balanced_accuracy": recalls / (totals > 0).sum(dim=1),
        "macro_f1": harmonic / occurs.sum(dim=1),
        "majority_rate": totals.max(dim=1).values / count.to(torch.float64),
        "standard_error": (accuracy * (1 - accuracy) / count).sqrt(),
        "calibration_error": (bin_right - bin_confidence).abs().sum(dim=1) / count,
        "confidence_when_right": sure[0] / right,
        "confidence_when_wrong": sure[1] / (count - right),
        "count": count,
        "right": right,
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    by_class = zip(totals.tolist(), hits.tolist(), given.tolist(), strict=True)
    found = [
        {name: value for name, value in zip(columns, row, strict=True) if not math.isnan(value)}
        | dict(zip(COUNTS, lists, strict=True))
        for row, lists in zip(rows, by_class, strict=True)
    ]
    if in_detail and classes <= MOST_CLASSES:
        cells = (part * classes + labels) * classes + answers
        matrices = torch.bincount(cells, minlength=parts * classes**2).view(parts, classes, classes)
        for numbers, matrix in zip(found, matrices.tolist(), strict=True):
            numbers["confusion"] = matrix
    return found


def _bins(confidence: Tensor, bins: int) -> Tensor:
    """The bin of each confidence. A bin holds its upper bound but not its lower one, as in Guo et al. 2017."""
    return (confidence * bins).ceil().to(torch.int64).sub(1).clamp(0, bins - 1)


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
    """Lists of one shape, added number by number."""
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
