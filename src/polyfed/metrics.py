"""How good predictions are: accuracy, balanced accuracy, calibration, and confidence when right and when wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import DataError, NotFinite

BINS = 15


@dataclass(eq=False)
class Scores:
    """Sums over test examples from which all measures follow; batches and clients add up.

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
        # A bin holds its upper bound but not its lower one, as in Guo et al. 2017.
        bins = (confidence * self.bins).ceil().to(torch.int64).sub(1).clamp(0, self.bins - 1)
        self.bin_counts += torch.bincount(bins, minlength=self.bins)
        self.bin_right += torch.bincount(bins[right], minlength=self.bins)
        self.bin_confidence += torch.bincount(bins, weights=confidence, minlength=self.bins)
        self.confidence_right += float(confidence[right].sum())
        self.confidence_wrong += float(confidence[~right].sum())

    def add_logits(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch of logits, shape (n, classes), with its labels, shape (n,)."""
        self.add(logits.detach().softmax(dim=1), labels)

    def __add__(self, other: Scores) -> Scores:
        """The scores over both sets of examples."""
        if (self.classes, self.bins) != (other.classes, other.bins):
            raise DataError(
                f"Scores over {self.classes} classes and {self.bins} bins cannot be added to scores over "
                f"{other.classes} classes and {other.bins} bins."
            )
        both = Scores(self.classes, self.bins)
        for name in ("confusion", "bin_counts", "bin_right", "bin_confidence", "confidence_right", "confidence_wrong"):
            setattr(both, name, getattr(self, name) + getattr(other, name))
        return both

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

    def to_plain(self) -> dict[str, Any]:
        """The sums as plain numbers and lists, for JSON; confusion as (label, answer, count) where it is not 0."""
        cells = self.confusion.nonzero()
        return {
            "classes": self.classes,
            "bins": self.bins,
            "confusion": [[*cell, int(self.confusion[cell[0], cell[1]])] for cell in cells.tolist()],
            "bin_counts": self.bin_counts.tolist(),
            "bin_right": self.bin_right.tolist(),
            "bin_confidence": self.bin_confidence.tolist(),
            "confidence_right": self.confidence_right,
            "confidence_wrong": self.confidence_wrong,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Scores:
        """The scores that ``to_plain`` wrote."""
        scores = cls(plain["classes"], plain["bins"])
        for label, answer, count in plain["confusion"]:
            scores.confusion[label, answer] = count
        scores.bin_counts = torch.tensor(plain["bin_counts"], dtype=torch.int64)
        scores.bin_right = torch.tensor(plain["bin_right"], dtype=torch.int64)
        scores.bin_confidence = torch.tensor(plain["bin_confidence"], dtype=torch.float64)
        scores.confidence_right = float(plain["confidence_right"])
        scores.confidence_wrong = float(plain["confidence_wrong"])
        return scores

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
            raise DataError("Some predicted probabilities are outside 0 to 1. Give logits to add_logits.")
        return probabilities, labels


def measure(probabilities: Tensor, labels: Tensor) -> dict[str, float | int]:
    """All measures of one set of predictions.

    Args:
        probabilities: Predicted probabilities, shape (n, classes).
        labels: Right answers, shape (n,).
    """
    scores = Scores(probabilities.shape[1])
    scores.add(probabilities, labels)
    return scores.results()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
