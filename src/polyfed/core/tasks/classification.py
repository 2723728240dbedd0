"""Classification: every example has one class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.extras import Asked, ListOf, Record
from polyfed.core.metrics import COUNTS, MOST_CLASSES, Scores, results_of_parts, unevenness
from polyfed.core.tasks.task import COUNT, SHARE, WHOLE, ClassCounts, HasTargets, Headline, Prediction, Task, TaskScores, kind_of

UNEVEN = 3.0


class Classification(Task):
    """Every example has one class."""

    name = "classification"
    targets = "one whole number for each example, its class, from 0"
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
        strange = next((label for label in bounds if label < 0 or (classes is not None and label >= classes)), None)
        if strange is None:
            return ""
        return f"hold the label {strange}" + ("" if classes is None else f", and there are {classes} classes: 0 to {classes - 1}")

    def width(self, targets: Sequence[Tensor]) -> int:
        return 1 + max(int(part.max()) for part in targets if len(part))

    def class_counts(self, examples: HasTargets, classes: int) -> list[int]:
        counts: list[int] = torch.bincount(examples.labels, minlength=classes).tolist()
        return counts

    def problem_with_counts(self, counts: Sequence[int], samples: int, classes: int) -> str:
        if len(counts) != classes:
            return f"{len(counts)} class_counts for {classes} different classes"
        return "" if sum(counts) == samples else f"class_counts add up to {sum(counts)}, and it has {samples} examples"

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

    def doubt(self, predicted: Tensor) -> Tensor:
        entropy: Tensor = torch.special.entr(predicted).sum(dim=1)
        return entropy

    def scores(self, classes: int, in_detail: bool = False) -> TaskScores:
        return Scores(classes, in_detail=in_detail)

    def results_of_parts(
        self, predicted: Tensor, targets: Tensor, sizes: Sequence[int], classes: int, in_detail: bool = False
    ) -> list[dict[str, Any]]:
        return results_of_parts(predicted, targets, sizes, classes, in_detail=in_detail)

    def problem_with_record(self, record: Any, asked: Asked) -> str:
        return _RECORD.problem(record, asked) or problem_with_class_counts(record)

    def headline(self, counts: ClassCounts, split: str = "training") -> Headline:
        """Choose balanced accuracy if the classes of a domain are uneven, else accuracy."""
        uneven = {domain: ratio for domain, found in counts.items() if (ratio := unevenness(found)) > UNEVEN}
        if not uneven:
            return Headline("accuracy", f"No {split} set has a class with more than three times the images of the others.")
        worst = max(uneven, key=lambda domain: uneven[domain])
        more = f" ({len(uneven)} {split} sets are uneven)" if len(uneven) > 1 else ""
        return Headline(
            "balanced_accuracy",
            f"Classes are uneven, so balanced accuracy heads the tables. In {worst} the most frequent class has {uneven[worst]:.1f} times "
            f"the {split} images that the other classes have on average{more}. --metric accuracy shows accuracy instead.",
        )

    def no_better(self, record: Mapping[str, Any]) -> bool:
        """Its accuracy is not above the share of that class, and its balanced accuracy is within two standard errors of chance.

        A test set of one class cannot say; neither can scores of before counts were kept.
        """
        counts = [count for count in record.get("class_counts", ()) if count]
        if len(counts) < 2 or record["accuracy"] > record["majority_rate"] + 1e-9:
            return False
        chance = 1 / len(counts)
        error = math.sqrt(sum(chance * (1 - chance) / count for count in counts)) / len(counts)
        return bool(record["balanced_accuracy"] <= chance + 2 * error)

    def compared_with_nobody(self, record: Mapping[str, Any]) -> str:
        occurring = sum(count > 0 for count in record["class_counts"])
        accuracy, majority, balanced, chance = (
            f"{100 * value:.1f} %"
            for value in (record["accuracy"], record["majority_rate"], record["balanced_accuracy"], 1 / occurring)
        )
        return f"accuracy {accuracy}, that class {majority}, balanced accuracy {balanced} (chance {chance})"


def problem_with_class_counts(scores: Mapping[str, Any]) -> str:
    """Why counts by class cannot be; empty where they can, or where there are none."""
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
        return f"counts by class that do not add up to {scores['count']} test examples, {scores['right']} of them right"
    if any(r > min(n, a) for n, r, a in zip(counts, right, answers, strict=True)):
        return "counts more right answers of a class than there are"
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
        "confusion": ListOf(ListOf(COUNT, longest=MOST_CLASSES), longest=MOST_CLASSES, required=False),
    }
)
