"""What a task decides, and what its scores can do. The core asks the task; it never asks which one it is."""

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
"""Types of targets that are whole numbers."""
SHARE = Number(0, 1.001, required=False)
"""The form of a measure between 0 and 1."""
COUNT = Number(0, 1e12, whole=True)
"""The form of a number of examples."""
ClassCounts = Mapping[str, Sequence[float]]
"""Examples of each class, by domain."""


class HasTargets(Protocol):
    """Examples, as far as a task looks at them."""

    @property
    def labels(self) -> Tensor:
        """All targets."""

    def __len__(self) -> int: ...


class TaskScores(abc.ABC):
    """Sums over test examples from which all measures of a task follow; batches add up. ``in_detail``: also measures that cost more."""

    in_detail: bool

    @property
    @abc.abstractmethod
    def main(self) -> float:
        """The measure by which rounds and settings are chosen."""

    @abc.abstractmethod
    def add(self, predicted: Tensor, targets: Tensor) -> None:
        """Count a batch of predictions with its targets."""

    @abc.abstractmethod
    def results(self) -> dict[str, Any]:
        """All measures as plain numbers, with the sums they follow from. A mean over nothing is left out."""

    def answers(self) -> dict[str, Tensor]:
        """Target, answer and confidence for each example; empty if an example of the task has no single answer."""
        return {}


@dataclass(frozen=True)
class Headline:
    """The measure that heads the tables, and why it is this one."""

    measure: str
    reason: str

    @property
    def words(self) -> str:
        return MEASURES[self.measure]


@dataclass(frozen=True)
class Prediction:
    """The answer for one example.

    Attributes:
        label: the answer in words: the class, the labels, the numbers, or the classes of most pixels.
        probability: how sure the model is of it; NaN where it does not say.
        probabilities: by class or label its probability; by output its value; by class of pixels their share.
        mask: the class of each pixel, where pixels have one.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    mask: Tensor | None = field(default=None, compare=False)


class Task(abc.ABC):
    """What is learnt, as one value.

    Attributes:
        name: its name in settings, recipes and run folders.
        noun: what each name in ``DataSet.classes`` is.
        targets: the targets it takes, in words.
        default_loss: the loss of ``--loss auto``.
        default_model: the model for own data that name none.
        measures: the measures of its scores, the main one first.
        mark: a number that only its score records have.
        nobody: what a model is measured against, as "no better than ..." says it.
        class_labels: whether every example has one class. Methods that index by class need it (``Facts.class_labels``).
        min_main: the least value of the main measure; the largest is 1.
    """

    name: str
    noun: str = "class"
    targets: str
    default_loss: str
    default_model: str = "small_cnn"
    measures: tuple[str, ...]
    mark: str
    nobody: str = "always answering the most frequent class"
    class_labels: bool = False
    min_main: float = 0.0

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    @property
    def main_measure(self) -> str:
        """The measure by which rounds and settings are chosen."""
        return self.measures[0]

    # ------------------------------------------------------------------------------------------------------ targets
    @abc.abstractmethod
    def problem(self, targets: Tensor, classes: int | None = None) -> str:
        """Why these are no targets of the task, as the end of a sentence; empty where they are."""

    @abc.abstractmethod
    def width(self, targets: Sequence[Tensor]) -> int:
        """How many classes (labels, outputs) the targets of some given data have."""

    def chance_loss(self, outputs: int) -> float | None:
        """Return the default loss of a model that gives every class or label the same probability; None if the task has none."""
        return None

    def for_loss(self, y: Tensor) -> Tensor:
        """A batch of targets as the loss takes them."""
        return y

    def check(self, examples: HasTargets, whose: str, classes: int) -> None:
        """Refuse targets of another kind, or beyond the classes."""
        if len(examples) and (problem := self.problem(examples.labels, classes)):
            raise DataError(f"Targets of {whose} {problem}. {self.name.capitalize()} takes {self.targets}.")

    def class_counts(self, examples: HasTargets, classes: int) -> list[int]:
        """Training examples of each class, where the task counts any; else nothing."""
        return []

    def problem_with_counts(self, counts: Sequence[int], samples: int, classes: int) -> str:
        """Why these cannot be the class counts of this number of examples; empty where they can."""
        return f"{len(counts)} class_counts, and {self.name} counts none" if counts else ""

    def strata(self, examples: HasTargets) -> Tensor:
        """A class for each example, within which a random split takes equal shares; one for all where there are none."""
        return torch.zeros(len(examples), dtype=torch.int64)

    @abc.abstractmethod
    def blank_targets(self, samples: int, class_counts: Sequence[int], classes: int, input_shape: Sequence[int]) -> Tensor:
        """Targets in the place of ones that are not here."""

    def require_class_labels(self, what: str) -> None:
        """Refuse what needs one class for each example."""
        if not self.class_labels:
            raise SettingError(f"{what} needs one class label for each example, and the task is {self.name}: {self.targets}.")

    # ------------------------------------------------------------------------------------------------------ predictions
    def output_shape(self, inputs: Tensor, classes: int) -> tuple[int, ...]:
        """The shape of a model's output for a batch."""
        return (len(inputs), classes)

    @abc.abstractmethod
    def predicted(self, outputs: Tensor) -> Tensor:
        """Predictions from a model's outputs."""

    def doubt(self, predicted: Tensor) -> Tensor:
        """How unsure a model is of each example (entropy); the newcomer choice ``nearest`` takes the surest client."""
        raise SettingError(
            f"--newcomer nearest compares how sure models are of their answers, and a model for {self.name} does not say. "
            "Use averaged, re-estimated or ensemble."
        )

    @abc.abstractmethod
    def answer(self, predicted: Tensor, classes: Sequence[str]) -> Prediction:
        """What was predicted for one example."""

    # ------------------------------------------------------------------------------------------------------ scores
    @abc.abstractmethod
    def scores(self, classes: int, in_detail: bool = False) -> TaskScores:
        """Scores to add batches to."""

    def results_of_parts(
        self, predicted: Tensor, targets: Tensor, sizes: Sequence[int], classes: int, in_detail: bool = False
    ) -> list[dict[str, Any]]:
        """The results of several parts that lie one after the other."""
        found = []
        for own, aims in zip(torch.split(predicted, list(sizes)), torch.split(targets, list(sizes)), strict=True):
            scores = self.scores(classes, in_detail)
            scores.add(own, aims)
            found.append(scores.results())
        return found

    def pooled(self, many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The scores of several clients on one domain as those of one."""
        found = pooled(many)
        return found | (plain(self.from_sums(found)) if len(many) > 1 else {})

    def from_sums(self, record: Mapping[str, Any]) -> dict[str, float]:
        """The measures that follow from the sums of a record, where the mean over clients is not exact."""
        return {}

    @abc.abstractmethod
    def problem_with_record(self, record: Any) -> str:
        """Why something is no score record of the task; empty where it is one."""

    def headline(self, counts: ClassCounts, split: str = "training") -> Headline:
        """Choose the metric of ``--metric auto`` from the class counts of a split."""
        return Headline(self.main_measure, f"It is the main measure of the task {self.name}.")

    def no_better(self, record: Mapping[str, Any]) -> bool:
        """Whether a model does no better than ``nobody``."""
        return False

    def compared_with_nobody(self, record: Mapping[str, Any]) -> str:
        """The numbers behind ``no_better``."""
        return ""


def finite(predicted: Tensor) -> Tensor:
    """Predictions, unless some are not finite."""
    if not bool(predicted.isfinite().all()):
        raise NotFinite("Some predictions are NaN or infinite, so they cannot be scored: the model has diverged.")
    return predicted


def require_probabilities(predicted: Tensor) -> None:
    """Refuse predictions that are no probabilities."""
    if predicted.numel() and (float(predicted.min()) < 0 or float(predicted.max()) > 1 + 1e-4):
        raise DataError("Some predicted probabilities are outside 0 to 1. A method's predict returns probabilities, not logits.")


def plain(found: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not math.isnan(value)}


def kind_of(targets: Tensor) -> str:
    """The type and shape of targets, in words."""
    shape = ", ".join(["n", *map(str, targets.shape[1:])])
    return f"are {str(targets.dtype).removeprefix('torch.')} of shape ({shape}{',' if targets.dim() == 1 else ''})"
