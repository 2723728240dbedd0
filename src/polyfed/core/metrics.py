"""How good predictions are: accuracy, balanced accuracy, calibration, and confidence when right and when wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyfed.core.extras import Number, Record
from polyfed.errors import DataError, NotFinite

BINS = 15


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
    """

    classes: int
    bins: int = BINS
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
        return _ratio(self.right, self.count)

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that occur."""
        totals = self.confusion.sum(dim=1)
        recalls = (self.confusion.diagonal() / totals.to(torch.float64))[totals > 0]
        return float(recalls.mean()) if len(recalls) else math.nan

    @property
    def standard_error(self) -> float:
        """Binomial standard error of the accuracy, ``sqrt(p (1 - p) / n)``."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.count) if self.count else math.nan

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean distance between accuracy and confidence, over bins by their size."""
        return _ratio(float((self.bin_right - self.bin_confidence).abs().sum()), self.count)

    def results(self) -> dict[str, float | int]:
        """All measures as plain numbers. A mean over nothing (no example, no wrong answer) is left out."""
        found: dict[str, float | int] = {
            "accuracy": self.accuracy,
            "balanced_accuracy": self.balanced_accuracy,
            "standard_error": self.standard_error,
            "calibration_error": self.calibration_error,
            "confidence_when_right": _ratio(self.confidence_right, self.right),
            "confidence_when_wrong": _ratio(self.confidence_wrong, self.count - self.right),
            "count": self.count,
            "right": self.right,
        }
        return {name: value for name, value in found.items() if not math.isnan(value)}

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
    probabilities: Tensor, labels: Tensor, sizes: Sequence[int], classes: int, bins: int = BINS
) -> list[dict[str, float | int]]:
    """What ``Scores.results`` says of each of several parts that lie one after the other, for all of them in a few operations."""
    probabilities, labels = Scores(classes)._checked(probabilities, labels)
    parts = len(sizes)
    part = torch.repeat_interleave(torch.arange(parts), torch.tensor(sizes))
    confidence, answers = probabilities.max(dim=1)
    is_right = answers == labels
    count, right = torch.tensor(sizes), torch.bincount(part[is_right], minlength=parts)
    accuracy = right / count.to(torch.float64)
    totals = torch.bincount(part * classes + labels, minlength=parts * classes).view(parts, classes)
    hits = torch.bincount((part * classes + labels)[is_right], minlength=parts * classes).view(parts, classes)
    recalls = (hits / totals.to(torch.float64)).nan_to_num(0.0).sum(dim=1)
    places = part * bins + _bins(confidence, bins)
    bin_right = torch.bincount(places[is_right], minlength=parts * bins).view(parts, bins)
    bin_confidence = torch.bincount(places, weights=confidence, minlength=parts * bins).view(parts, bins)
    sure = [torch.bincount(part[which], weights=confidence[which], minlength=parts) for which in (is_right, ~is_right)]
    columns = {
        "accuracy": accuracy,
        "balanced_accuracy": recalls / (totals > 0).sum(dim=1),
        "standard_error": (accuracy * (1 - accuracy) / count).sqrt(),
        "calibration_error": (bin_right - bin_confidence).abs().sum(dim=1) / count,
        "confidence_when_right": sure[0] / right,
        "confidence_when_wrong": sure[1] / (count - right),
        "count": count,
        "right": right,
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [{name: value for name, value in zip(columns, row, strict=True) if not math.isnan(value)} for row in rows]


def _bins(confidence: Tensor, bins: int) -> Tensor:
    """The bin of each confidence. A bin holds its upper bound but not its lower one, as in Guo et al. 2017."""
    return (confidence * bins).ceil().to(torch.int64).sub(1).clamp(0, bins - 1)


_SHARE = Number(0, 1.001, required=False)
_COUNT = Number(0, 1e12, whole=True)
SCORES = Record(
    {
        "accuracy": _SHARE,
        "balanced_accuracy": _SHARE,
        "standard_error": _SHARE,
        "calibration_error": _SHARE,
        "confidence_when_right": _SHARE,
        "confidence_when_wrong": _SHARE,
        "count": _COUNT,
        "right": _COUNT,
    }
)
"""The form of ``Scores.results``, as clients send it."""


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
