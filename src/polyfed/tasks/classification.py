"""Classification: every example has one class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import DataError, NotFinite
from polyfed.extras import ListOf, Record
from polyfed.tasks.metrics import COUNTS, MAX_CLASSES, area_under_roc, macro_f1, majority_rate, ratio, unevenness
from polyfed.tasks.task import (
    COUNT,
    SHARE,
    WHOLE,
    ClassCounts,
    HasTargets,
    Headline,
    Prediction,
    Task,
    TaskScores,
    kind_of,
    plain,
    require_probabilities,
)

UNEVEN = 3.0
BINS = 15
"""Number of confidence bins of equal width for the calibration error."""


class Classification(Task):
    """Every example has one class."""

    name = "classification"
    targets = "one integer per example, its class, starting at 0"
    default_loss = "cross_entropy"
    measures = (
        *("accuracy", "balanced_accuracy", "macro_f1", "auroc"),
        *("calibration_error", "confidence_when_right", "confidence_when_wrong"),
    )
    mark = "confidence_when_right"
    class_labels = True

    def chance_loss(self, outputs: int) -> float | None:
        return math.log(outputs)

    def problem(self, targets: Tensor, classes: int | None = None) -> str:
        if targets.dtype not in WHOLE or targets.dim() != 1:
            return kind_of(targets)
        bounds = (int(targets.min()), int(targets.max())) if len(targets) else (0, 0)
        invalid = next((label for label in bounds if label < 0 or (classes is not None and label >= classes)), None)
        if invalid is None:
            return ""
        return f"contain the label {invalid}" + ("" if classes is None else f", but the {classes} classes are 0 to {classes - 1}")

    def width(self, targets: Sequence[Tensor]) -> int:
        return 1 + max(int(part.max()) for part in targets if len(part))

    def class_counts(self, examples: HasTargets, classes: int) -> list[int]:
        counts: list[int] = torch.bincount(examples.labels, minlength=classes).tolist()
        return counts

    def problem_with_counts(self, counts: Sequence[int], samples: int, classes: int) -> str:
        if len(counts) != classes:
            return f"{len(counts)} class_counts for {classes} different classes"
        return "" if sum(counts) == samples else f"class_counts add up to {sum(counts)}, but it has {samples} examples"

    def strata(self, examples: HasTargets) -> Tensor:
        return examples.labels

    def blank_targets(self, samples: int, class_counts: Sequence[int], classes: int, input_shape: Sequence[int]) -> Tensor:
        if not class_counts:
            return torch.arange(samples) % classes
        return torch.repeat_interleave(torch.arange(len(class_counts)), torch.tensor(class_counts))

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def answer(self, predicted: Tensor, classes: Sequence[str]) -> Prediction:
        place = int(predicted.argmax())
        by_class = {name: float(value) for name, value in zip(classes, predicted, strict=True)}
        return Prediction(classes[place], float(predicted[place]), by_class)

    def entropy(self, predicted: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(predicted).sum(dim=1)
        return entropy

    def scores(self, classes: int, in_detail: bool = False) -> TaskScores:
        return Scores(classes, in_detail)

    def results_of_parts(
        self, predicted: Tensor, targets: Tensor, sizes: Sequence[int], classes: int, in_detail: bool = False
    ) -> list[dict[str, Any]]:
        return results_of_parts(predicted, targets, sizes, classes, in_detail)

    def problem_with_record(self, record: Any) -> str:
        return _RECORD.problem(record, None) or problem_with_class_counts(record)

    def headline(self, counts: ClassCounts, split: str = "training") -> Headline:
        """Choose balanced accuracy if the classes of a domain are uneven, otherwise accuracy."""
        uneven = {domain: ratio for domain, found in counts.items() if (ratio := unevenness(found)) > UNEVEN}
        if not uneven:
            return Headline("accuracy", f"No {split} set has a class with more than three times the images of the others.")
        worst = max(uneven, key=lambda domain: uneven[domain])
        more = f" ({len(uneven)} {split} sets are uneven)" if len(uneven) > 1 else ""
        return Headline(
            "balanced_accuracy",
            f"Classes are uneven, so balanced accuracy is the primary metric. In {worst} the most frequent class has {uneven[worst]:.1f} times "
            f"the {split} images that the other classes have on average{more}. --metric accuracy shows accuracy instead.",
        )

    def no_better(self, record: Mapping[str, Any]) -> bool:
        """Return True if accuracy is not above the baseline, and balanced accuracy is within two standard errors of chance.

        Test sets with one class, and old records without counts, are inconclusive.
        """
        counts = [count for count in record.get("class_counts", ()) if count]
        if len(counts) < 2 or record["accuracy"] > record["majority_rate"] + 1e-9:
            return False
        chance = 1 / len(counts)
        error = math.sqrt(sum(chance * (1 - chance) / count for count in counts)) / len(counts)
        return bool(record["balanced_accuracy"] <= chance + 2 * error)

    def compared_with_baseline(self, record: Mapping[str, Any]) -> str:
        occurring = sum(count > 0 for count in record["class_counts"])
        accuracy, majority, balanced, chance = (
            f"{100 * value:.1f} %"
            for value in (record["accuracy"], record["majority_rate"], record["balanced_accuracy"], 1 / occurring)
        )
        return f"accuracy {accuracy}, baseline {majority}, balanced accuracy {balanced} (chance {chance})"


class Scores(TaskScores):
    """Sums over test examples, from which all metrics are computed.

    >>> scores = Scores(classes=2)
    >>> scores.add(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    >>> scores.results()["accuracy"]
    0.5

    Attributes:
        classes: Number of classes.
        in_detail: Keep the prediction for each example and, for the AUROC, all probabilities (up to 200 classes).
        confusion: Number of examples of class i predicted as class j, int64, shape (classes, classes).
        bin_right: Correct predictions per confidence bin, int64, shape (bins,).
        bin_confidence: Sum of confidence per bin, float64, shape (bins,).
        confidence: Sums of the confidence of correct and of wrong predictions.
    """

    def __init__(self, classes: int, in_detail: bool = False) -> None:
        self.classes, self.in_detail = classes, in_detail
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64)
        self.bin_right = torch.zeros(BINS, dtype=torch.int64)
        self.bin_confidence = torch.zeros(BINS, dtype=torch.float64)
        self.confidence = (0.0, 0.0)
        self._labels: list[Tensor] = []
        self._answers: list[tuple[Tensor, Tensor]] = []
        self._probabilities: list[Tensor] = []

    def add(self, predicted: Tensor, targets: Tensor) -> None:
        """Add a batch of probabilities, shape (n, classes), with its labels, shape (n,)."""
        probabilities, labels = checked(predicted, targets, self.classes)
        confidence, answers = probabilities.max(dim=1)
        right = answers == labels
        self.confusion += torch.bincount(labels * self.classes + answers, minlength=self.classes**2).view_as(self.confusion)
        bins = confidence_bins(confidence)
        self.bin_right += torch.bincount(bins[right], minlength=BINS)
        self.bin_confidence += torch.bincount(bins, weights=confidence, minlength=BINS)
        self.confidence = (
            self.confidence[0] + float(confidence[right].sum()),
            self.confidence[1] + float(confidence[~right].sum()),
        )
        if self.in_detail:
            self._labels.append(labels)
            self._answers.append((answers, confidence))
            if self.classes <= MAX_CLASSES:
                self._probabilities.append(probabilities.to(torch.float32))

    @property
    def main(self) -> float:
        return ratio(int(self.confusion.trace()), int(self.confusion.sum()))

    @property
    def balanced_accuracy(self) -> float:
        totals = self.confusion.sum(dim=1)
        recalls = (self.confusion.diagonal() / totals.to(torch.float64))[totals > 0]
        return float(recalls.mean()) if len(recalls) else math.nan

    @property
    def auroc(self) -> float:
        """Mean one-versus-rest area under the ROC curve, over classes with both positive and negative examples.

        The area is the fraction of pairs (an example of the class, one of another) in which the first has the higher probability; ties
        count half (Hand and Till 2001).
        """
        if not self._probabilities:
            return math.nan
        labels, scores = torch.cat(self._labels), torch.cat(self._probabilities)
        areas = [
            area_under_roc(scores[:, c], labels == c) for c in range(self.classes) if 0 < int((labels == c).sum()) < len(labels)
        ]
        return ratio(sum(areas), len(areas))

    def answers(self) -> dict[str, Tensor]:
        """Return label, prediction and confidence per example, in order, if scores are kept in detail."""
        columns = {
            "labels": (self._labels, torch.int32),
            "answers": ([answers for answers, _ in self._answers], torch.int32),
            "confidence": ([confidence for _, confidence in self._answers], torch.float32),
        }
        return {name: torch.cat(parts).to(kind) if parts else torch.zeros(0, dtype=kind) for name, (parts, kind) in columns.items()}

    def results(self) -> dict[str, Any]:
        """Return all metrics as plain numbers, and counts per class. Undefined means (no example, no wrong prediction) are omitted."""
        counts = (self.confusion.sum(dim=1).tolist(), self.confusion.diagonal().tolist(), self.confusion.sum(dim=0).tolist())
        gap = float((self.bin_right - self.bin_confidence).abs().sum())
        matrix = {"confusion": self.confusion.tolist()} if self.in_detail and self.classes <= MAX_CLASSES else {}
        return _measures(counts, self.balanced_accuracy, gap, self.confidence, self.auroc) | matrix


def results_of_parts(
    predicted: Tensor, targets: Tensor, sizes: Sequence[int], classes: int, in_detail: bool = False
) -> list[dict[str, Any]]:
    """Return ``Scores.results`` for each of several consecutive parts, with the sums computed for all parts at once.

    ``in_detail`` adds the confusion matrix but not the AUROC, since clients that share a batch have few examples.
    """
    probabilities, labels = checked(predicted, targets, classes)
    parts = len(sizes)
    part = torch.repeat_interleave(torch.arange(parts), torch.tensor(sizes))
    confidence, answers = probabilities.max(dim=1)
    right = answers == labels

    def summed(places: Tensor, wide: int, weights: Tensor | None = None) -> Tensor:
        return torch.bincount(places, weights=weights, minlength=parts * wide).view(parts, wide)

    by_label, bins = part * classes + labels, part * BINS + confidence_bins(confidence)
    totals, hits, given = summed(by_label, classes), summed(by_label[right], classes), summed(part * classes + answers, classes)
    recalls = (hits / totals.to(torch.float64)).nan_to_num(0.0).sum(dim=1)
    gaps = (summed(bins[right], BINS) - summed(bins, BINS, confidence)).abs().sum(dim=1)
    sure = torch.cat([summed(part[which], 1, confidence[which]) for which in (right, ~right)], dim=1)
    found = [
        _measures(*row)
        for row in zip(
            zip(totals.tolist(), hits.tolist(), given.tolist(), strict=True),
            (recalls / (totals > 0).sum(dim=1)).tolist(),
            gaps.tolist(),
            sure.tolist(),
            strict=True,
        )
    ]
    if in_detail and classes <= MAX_CLASSES:
        for numbers, matrix in zip(found, summed(by_label * classes + answers, classes**2).tolist(), strict=True):
            numbers["confusion"] = [matrix[start : start + classes] for start in range(0, classes**2, classes)]
    return found


def _measures(
    counts: Sequence[list[int]], balanced: float, gap: float, confidence: Sequence[float], auroc: float = math.nan
) -> dict[str, Any]:
    """Return the score record.

    Args:
        counts: Test examples, correct predictions and predictions, per class.
        balanced: Balanced accuracy.
        gap: Difference between correct predictions and summed confidence, summed over the confidence bins.
        confidence: Sums of the confidence of correct and of wrong predictions.
        auroc: AUROC, if scores are in detail.
    """
    count, right = sum(counts[0]), sum(counts[1])
    accuracy = ratio(right, count)
    found = {
        "accuracy": accuracy,
        "balanced_accuracy": balanced,
        "macro_f1": macro_f1(*counts),
        "auroc": auroc,
        "majority_rate": majority_rate(counts[0]),
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / count) if count else math.nan,
        "calibration_error": ratio(gap, count),
        "confidence_when_right": ratio(confidence[0], right),
        "confidence_when_wrong": ratio(confidence[1], count - right),
        "count": count,
        "right": right,
    }
    return plain(found) | dict(zip(COUNTS, counts, strict=True))


def checked(probabilities: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the batch on the CPU in double precision. Raise an error if it is invalid."""
    if probabilities.shape != (len(labels), classes):
        raise DataError(
            f"Probabilities of shape {tuple(probabilities.shape)} do not match {len(labels)} labels and {classes} classes."
        )
    probabilities, labels = probabilities.detach().to("cpu", torch.float64), labels.to("cpu", torch.int64)
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise DataError(f"Labels go from {int(labels.min())} to {int(labels.max())}, but the classes go from 0 to {classes - 1}.")
    if not bool(probabilities.isfinite().all()):
        raise NotFinite("Some predicted probabilities are NaN or infinite, so they cannot be scored: the model has diverged.")
    require_probabilities(probabilities)
    return probabilities, labels


def confidence_bins(confidence: Tensor, bins: int = BINS) -> Tensor:
    """Return the bin of each confidence. A bin includes its upper bound but not its lower one, as in Guo et al. 2017."""
    return (confidence * bins).ceil().to(torch.int64).sub(1).clamp(0, bins - 1)


def problem_with_class_counts(scores: Mapping[str, Any]) -> str:
    """Return why counts per class are invalid; empty if they are valid, or if there are none."""
    given = [key for key in (*COUNTS, "confusion") if key in scores]
    if not given:
        return ""
    missing = [key for key in COUNTS if key not in scores]
    if missing:
        return f"has no {missing[0]!r}, expected all of {', '.join(COUNTS)}"
    counts, right, answers = (scores[key] for key in COUNTS)
    if not len(counts) == len(right) == len(answers):
        return "counts different numbers of classes"
    if sum(counts) != scores["count"] or sum(answers) != scores["count"] or sum(right) != scores["right"]:
        return f"counts by class that do not add up to {scores['count']} test examples with {scores['right']} correct predictions"
    if any(r > min(n, a) for n, r, a in zip(counts, right, answers, strict=True)):
        return "counts more correct predictions of a class than examples"
    matrix = scores.get("confusion")
    if matrix is not None and (
        [sum(row) for row in matrix] != list(counts)
        or any(len(row) != len(counts) for row in matrix)
        or [row[place] for place, row in enumerate(matrix)] != list(right)
        or [sum(column) for column in zip(*matrix, strict=True)] != list(answers)
    ):
        return "has a 'confusion' that does not fit its counts by class"
    return ""


_RECORD = Record(
    {
        **dict.fromkeys(
            (
                *("accuracy", "balanced_accuracy", "macro_f1", "auroc", "majority_rate", "standard_error"),
                *("calibration_error", "confidence_when_right", "confidence_when_wrong"),
            ),
            SHARE,
        ),
        "count": COUNT,
        "right": COUNT,
        **dict.fromkeys(COUNTS, ListOf(COUNT, longest=1_000_000, required=False)),
        "confusion": ListOf(ListOf(COUNT, longest=MAX_CLASSES), longest=MAX_CLASSES, required=False),
    }
)
