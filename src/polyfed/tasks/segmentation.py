"""Segmentation: every pixel has a class. Pixels with the value ``IGNORED`` are neither trained on nor scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import DataError
from polyfed.extras import ListOf, Record
from polyfed.tasks.classification import problem_with_class_counts
from polyfed.tasks.metrics import COUNTS, MAX_CLASSES, balanced_accuracy, macro_f1, majority_rate, ratio
from polyfed.tasks.task import COUNT, SHARE, WHOLE, Prediction, Task, TaskScores, finite, kind_of, plain

IGNORED = 255
"""Value of pixels without a class, in all masks. Data set readers map unlabelled pixels to it."""


class Segmentation(Task):
    """Every pixel has a class."""

    name = "segmentation"
    targets = f"an integer mask per image, of the same size: the class of each pixel, starting at 0 ({IGNORED}: ignored)"
    default_loss = "pixel_cross_entropy"
    default_model = "small_unet"
    measures = ("mean_iou", "accuracy", "balanced_accuracy", "macro_f1")
    mark = "pixels"

    def chance_loss(self, outputs: int) -> float | None:
        return math.log(outputs)

    def problem(self, targets: Tensor, classes: int | None = None) -> str:
        if targets.dtype not in WHOLE or targets.dim() != 3:
            return kind_of(targets)
        most = IGNORED if classes is None else classes
        invalid = next((value for value in values_in(targets) if value < 0 or (value >= most and value != IGNORED)), None)
        if invalid is None:
            return ""
        return f"contain the class {invalid}" + (
            "" if classes is None else f", but the {classes} classes are 0 to {classes - 1} ({IGNORED}: ignored)"
        )

    def width(self, targets: Sequence[Tensor]) -> int:
        kept = [part[part != IGNORED] for part in targets]
        return 1 + max((int(part.max()) for part in kept if len(part)), default=0)

    def for_loss(self, y: Tensor) -> Tensor:
        return y.to(torch.int64)

    def blank_targets(self, samples: int, class_counts: Sequence[int], classes: int, input_shape: Sequence[int]) -> Tensor:
        return torch.zeros(1, 1, 1, dtype=torch.uint8).expand(samples, *input_shape[-2:])

    def output_shape(self, inputs: Tensor, classes: int) -> tuple[int, ...]:
        return (len(inputs), classes, *inputs.shape[-2:])

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)

    def answer(self, predicted: Tensor, classes: Sequence[str]) -> Prediction:
        sure, mask = predicted.max(dim=0)
        counts = torch.bincount(mask.flatten(), minlength=len(classes)).tolist()
        shares = {name: count / mask.numel() for name, count in zip(classes, counts, strict=True)}
        most = sorted(shares, key=lambda name: -shares[name])[:3]
        words = ", ".join(f"{name} {100 * shares[name]:.0f} %" for name in most if shares[name])
        return Prediction(words, float(sure.mean()), shares, mask.to(torch.uint8))

    def entropy(self, predicted: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(predicted).sum(dim=1).flatten(1).mean(dim=1)
        return entropy

    def scores(self, classes: int, in_detail: bool = False) -> TaskScores:
        return PixelScores(classes, in_detail)

    def from_sums(self, record: Mapping[str, Any]) -> dict[str, float]:
        return pixel_measures(record)

    def problem_with_record(self, record: Any) -> str:
        problem = _RECORD.problem(record, None)
        return problem or problem_with_class_counts({**record, "count": record["pixels"], "right": sum(record["class_right"])})

    def no_better(self, record: Mapping[str, Any]) -> bool:
        """Return True if the pixel accuracy is not above the baseline."""
        occurring = sum(count > 0 for count in record.get("class_counts", ()))
        return occurring > 1 and bool(record["accuracy"] <= record["majority_rate"] + 1e-9)

    def compared_with_baseline(self, record: Mapping[str, Any]) -> str:
        return f"pixel accuracy {100 * record['accuracy']:.1f} %, baseline {100 * record['majority_rate']:.1f} %"


def values_in(masks: Tensor) -> list[int]:
    """Return the values that occur in masks. Reads a few masks at a time to bound the memory."""
    found: set[int] = set()
    for few in torch.split(masks, 64):
        found |= set(
            torch.unique(few).tolist() if few.dtype is not torch.uint8 else few.flatten().bincount().nonzero().flatten().tolist()
        )
    return sorted(found)


class PixelScores(TaskScores):
    """Confusion matrix over pixels, without ignored ones.

    >>> scores = PixelScores(classes=2)
    >>> scores.add(torch.tensor([[[[0.9, 0.2, 0.1]], [[0.1, 0.8, 0.9]]]]), torch.tensor([[[0, 0, 255]]]))
    >>> scores.results()["accuracy"], scores.results()["mean_iou"]
    (0.5, 0.25)
    """

    def __init__(self, classes: int, in_detail: bool = False) -> None:
        self.classes, self.in_detail = classes, in_detail
        self.count = 0
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, predicted: Tensor, targets: Tensor) -> None:
        """Add a batch of probabilities, shape (n, classes, height, width), with its masks, shape (n, height, width)."""
        wanted = (len(targets), self.classes, *targets.shape[1:])
        if tuple(predicted.shape) != wanted or targets.dim() != 3:
            raise DataError(
                f"Predictions of shape {tuple(predicted.shape)} do not match masks of shape {tuple(targets.shape)} and {self.classes} "
                f"classes; expected {wanted}."
            )
        answers = finite(predicted.detach()).argmax(dim=1).to("cpu")
        targets = targets.to("cpu", torch.int64)
        scored = targets != IGNORED
        labels, answers = targets[scored], answers[scored]
        if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= self.classes):
            raise DataError(
                f"Masks contain classes from {int(labels.min())} to {int(labels.max())}, but the classes go from 0 to {self.classes - 1}."
            )
        self.count += len(targets)
        self.confusion += torch.bincount(labels * self.classes + answers, minlength=self.classes**2).view_as(self.confusion)

    @property
    def main(self) -> float:
        """Mean intersection over union."""
        return pixel_measures(self._record())["mean_iou"]

    def _record(self) -> dict[str, Any]:
        by_class = (self.confusion.sum(dim=1), self.confusion.diagonal(), self.confusion.sum(dim=0))
        counts = {name: values.tolist() for name, values in zip(COUNTS, by_class, strict=True)}
        return {"count": self.count, "pixels": int(self.confusion.sum()), **counts}

    def results(self) -> dict[str, Any]:
        record = self._record()
        matrix = {"confusion": self.confusion.tolist()} if self.in_detail and self.classes <= MAX_CLASSES else {}
        return plain(pixel_measures(record)) | record | matrix


def pixel_measures(record: Mapping[str, Any]) -> dict[str, float]:
    """Compute the metrics from pixel counts per class. The mean IoU is over the classes that occur or were predicted."""
    counts, right, answers = (record[name] for name in COUNTS)
    unions = [(r, n + a - r) for n, r, a in zip(counts, right, answers, strict=True) if n + a]
    return {
        "mean_iou": ratio(sum(part / whole for part, whole in unions), len(unions)),
        "accuracy": ratio(sum(right), record["pixels"]),
        "balanced_accuracy": balanced_accuracy(counts, right),
        "macro_f1": macro_f1(counts, right, answers),
        "majority_rate": majority_rate(counts),
    }


_RECORD = Record(
    {
        **dict.fromkeys(("mean_iou", "accuracy", "balanced_accuracy", "macro_f1", "majority_rate"), SHARE),
        "count": COUNT,
        "pixels": COUNT,
        **dict.fromkeys(COUNTS, ListOf(COUNT, longest=IGNORED)),
        "confusion": ListOf(ListOf(COUNT, longest=MAX_CLASSES), longest=MAX_CLASSES, required=False),
    }
)
