"""Interfaces of a task and its scores. The core uses only these; it does not depend on a specific task."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from polyfed.errors import DataError, NotFinite, SettingError
from polyfed.extras import Number
from polyfed.tasks.metrics import MEASURES, pooled

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Integer types of targets."""
SHARE = Number(0, 1.001, required=False)
"""Declaration of a metric between 0 and 1."""
COUNT = Number(0, 1e12, whole=True)
"""Declaration of a number of examples."""
ClassCounts = Mapping[str, Sequence[float]]
"""Number of examples per class, by domain."""


class HasTargets(Protocol):
    """The part of ``Examples`` that a task uses."""

    @property
    def labels(self) -> Tensor:
        """All targets."""

    def __len__(self) -> int: ...


class TaskScores(abc.ABC):
    """Sums over test examples, from which all metrics are computed. ``in_detail`` includes the expensive metrics."""

    in_detail: bool

    @property
    @abc.abstractmethod
    def main(self) -> float:
        """Metric that selects rounds and settings."""

    @abc.abstractmethod
    def add(self, predicted: Tensor, targets: Tensor) -> None:
        """Add a batch of predictions with its targets."""

    @abc.abstractmethod
    def results(self) -> dict[str, Any]:
        """Return all metrics as plain numbers, with their sums. Undefined means are omitted."""

    def answers(self) -> dict[str, Tensor]:
        """Return target, prediction and confidence per example; empty if the task has no single prediction per example."""
        return {}


@dataclass(frozen=True)
class Headline:
    """Primary metric, with the reason for the choice."""

    measure: str
    reason: str

    @property
    def words(self) -> str:
        return MEASURES[self.measure]


@dataclass(frozen=True)
class Prediction:
    """Prediction for one example.

    Attributes:
        label: Prediction as text: the class, the labels, the numbers, or the most frequent pixel classes.
        probability: Confidence of the model; NaN if the task has none.
        probabilities: Probability per class or label, value per output, or fraction of pixels per class.
        mask: Class per pixel (segmentation).
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    mask: Tensor | None = field(default=None, compare=False)


class Task(abc.ABC):
    """Task of a data set: its targets, predictions and scores.

    Attributes:
        name: Name in settings, recipes and run folders.
        noun: Noun for the names in ``DataSet.classes``.
        targets: Description of its targets.
        default_loss: Loss of ``--loss auto``.
        default_model: Default model for user-supplied data.
        measures: Metrics of its scores, the main one first.
        mark: Key that only its score records have.
        baseline: Trivial prediction that a model is compared with ("no better than ...").
        class_labels: True if every example has one class. Methods that index by class need it (``Facts.class_labels``).
        min_main: Minimum of the main metric; the maximum is 1.
    """

    name: str
    noun: str = "class"
    targets: str
    default_loss: str
    default_model: str = "small_cnn"
    measures: tuple[str, ...]
    mark: str
    baseline: str = "always predicting the most frequent class"
    class_labels: bool = False
    min_main: float = 0.0

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    @property
    def main_measure(self) -> str:
        """Metric that selects rounds and settings."""
        return self.measures[0]

    # ------------------------------------------------------------------------------------------------------ targets
    @abc.abstractmethod
    def problem(self, targets: Tensor, classes: int | None = None) -> str:
        """Return the reason why these targets are invalid, as a verb phrase, or an empty string."""

    @abc.abstractmethod
    def width(self, targets: Sequence[Tensor]) -> int:
        """Return the number of classes (labels, outputs) in the targets."""

    def chance_loss(self, outputs: int) -> float | None:
        """Return the default loss of a model that gives every class or label the same probability; None if the task has none."""
        return None

    def for_loss(self, y: Tensor) -> Tensor:
        """Convert a batch of targets for the loss."""
        return y

    def check(self, examples: HasTargets, whose: str, classes: int) -> None:
        """Raise ``DataError`` if targets are invalid."""
        if len(examples) and (problem := self.problem(examples.labels, classes)):
            raise DataError(f"Targets of {whose} {problem}. {self.name.capitalize()} needs {self.targets}.")

    def class_counts(self, examples: HasTargets, classes: int) -> list[int]:
        """Return the number of examples per class; empty if the task has no classes."""
        return []

    def problem_with_counts(self, counts: Sequence[int], samples: int, classes: int) -> str:
        """Return the reason why class counts are invalid for this number of examples, or an empty string."""
        return f"{len(counts)} class_counts, but {self.name} has no classes" if counts else ""

    def strata(self, examples: HasTargets) -> Tensor:
        """Return the stratum of each example, for stratified splits; 0 for all if the task has no classes."""
        return torch.zeros(len(examples), dtype=torch.int64)

    @abc.abstractmethod
    def blank_targets(self, samples: int, class_counts: Sequence[int], classes: int, input_shape: Sequence[int]) -> Tensor:
        """Return placeholder targets for data that is stored elsewhere."""

    def require_class_labels(self, what: str) -> None:
        """Raise ``SettingError`` if the task does not have one class per example."""
        if not self.class_labels:
            raise SettingError(f"{what} needs one class label per example, but the task is {self.name}: {self.targets}.")

    # ------------------------------------------------------------------------------------------------------ predictions
    def output_shape(self, inputs: Tensor, classes: int) -> tuple[int, ...]:
        """Return the shape of a model's output for a batch."""
        return (len(inputs), classes)

    @abc.abstractmethod
    def predicted(self, outputs: Tensor) -> Tensor:
        """Convert a model's outputs to predictions."""

    def entropy(self, predicted: Tensor) -> Tensor:
        """Return the entropy of each prediction, for ``--newcomer nearest``."""
        raise SettingError(
            f"--newcomer nearest compares the confidence of predictions, which {self.name} models do not provide. "
            "Use averaged, re-estimated or ensemble."
        )

    @abc.abstractmethod
    def answer(self, predicted: Tensor, classes: Sequence[str]) -> Prediction:
        """Return the prediction for one example."""

    # ------------------------------------------------------------------------------------------------------ scores
    @abc.abstractmethod
    def scores(self, classes: int, in_detail: bool = False) -> TaskScores:
        """Return empty scores."""

    def results_of_parts(
        self, predicted: Tensor, targets: Tensor, sizes: Sequence[int], classes: int, in_detail: bool = False
    ) -> list[dict[str, Any]]:
        """Return the results of several consecutive parts of a batch."""
        found = []
        for part, part_targets in zip(torch.split(predicted, list(sizes)), torch.split(targets, list(sizes)), strict=True):
            scores = self.scores(classes, in_detail)
            scores.add(part, part_targets)
            found.append(scores.results())
        return found

    def pooled(self, many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Combine the scores of several clients on one domain."""
        found = pooled(many)
        return found | (plain(self.from_sums(found)) if len(many) > 1 else {})

    def from_sums(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Recompute metrics from the sums of a record, if the mean over clients is not exact."""
        return {}

    @abc.abstractmethod
    def problem_with_record(self, record: Any) -> str:
        """Return the reason why something is not a score record of the task, or an empty string."""

    def headline(self, counts: ClassCounts, split: str = "training") -> Headline:
        """Choose the metric of ``--metric auto`` from the class counts of a split."""
        return Headline(self.main_measure, f"It is the main metric of the task {self.name}.")

    def no_better(self, record: Mapping[str, Any]) -> bool:
        """Return True if a model is no better than ``baseline``."""
        return False

    def compared_with_baseline(self, record: Mapping[str, Any]) -> str:
        """Return the numbers behind ``no_better``, as text."""
        return ""


def finite(predicted: Tensor) -> Tensor:
    """Return the predictions. Raise ``NotFinite`` if some are NaN or infinite."""
    if not bool(predicted.isfinite().all()):
        raise NotFinite("Some predictions are NaN or infinite, so they cannot be scored: the model has diverged.")
    return predicted


def require_probabilities(predicted: Tensor) -> None:
    """Raise ``DataError`` if some predictions are not probabilities."""
    if predicted.numel() and (float(predicted.min()) < 0 or float(predicted.max()) > 1 + 1e-4):
        raise DataError(
            "Some predicted probabilities are outside 0 to 1. A method's predict must return probabilities, not logits."
        )


def plain(found: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not math.isnan(value)}


def kind_of(targets: Tensor) -> str:
    """Describe the type and shape of targets, as a verb phrase."""
    shape = ", ".join(["n", *map(str, targets.shape[1:])])
    return f"are {str(targets.dtype).removeprefix('torch.')} of shape ({shape}{',' if targets.dim() == 1 else ''})"
