"""Multi-label classification: every example has any number of labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import DataError
from polyfed.extras import ListOf, Record
from polyfed.tasks.metrics import area_under_roc, macro_f1, ratio
from polyfed.tasks.task import COUNT, SHARE, HasTargets, Prediction, Task, TaskScores, finite, kind_of, plain, require_probabilities

COUNTS = ("label_counts", "label_right", "label_answers")
"""Per label: test examples that have it, correct positive predictions, and positive predictions."""


class MultiLabel(Task):
    """Every example has any number of labels."""

    name = "multilabel"
    noun = "label"
    targets = "a row of 0 and 1 per example, one column per label"
    default_loss = "binary_cross_entropy"
    measures = ("macro_f1", "accuracy", "exact_match", "micro_f1", "auroc")
    mark = "label_counts"
    baseline = "always predicting the more frequent value of each label"

    def chance_loss(self, outputs: int) -> float | None:
        return math.log(2)

    def problem(self, targets: Tensor, classes: int | None = None) -> str:
        if targets.dim() != 2:
            return kind_of(targets)
        if targets.dtype is not torch.bool and len(targets):
            invalid = targets[(targets != 0) & (targets != 1)]
            if len(invalid):
                return f"contain the value {invalid[0].item():g}"
        if classes is not None and targets.shape[1] != classes:
            return f"have {targets.shape[1]} columns, but there are {classes} labels"
        return ""

    def width(self, targets: Sequence[Tensor]) -> int:
        return int(targets[0].shape[1])

    def for_loss(self, y: Tensor) -> Tensor:
        return y.to(torch.float32)

    def class_counts(self, examples: HasTargets, classes: int) -> list[int]:
        counts: list[int] = examples.labels.to(torch.int64).sum(dim=0).tolist()
        return counts

    def problem_with_counts(self, counts: Sequence[int], samples: int, classes: int) -> str:
        if len(counts) != classes:
            return f"{len(counts)} class_counts for {classes} different labels"
        return "" if max(counts, default=0) <= samples else f"class_counts up to {max(counts)}, but it has {samples} examples"

    def blank_targets(self, samples: int, class_counts: Sequence[int], classes: int, input_shape: Sequence[int]) -> Tensor:
        counts = torch.tensor(list(class_counts) or [0] * classes)
        return torch.arange(samples)[:, None] < counts[None]

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def answer(self, predicted: Tensor, classes: Sequence[str]) -> Prediction:
        by_label = {name: float(value) for name, value in zip(classes, predicted, strict=True)}
        given = [name for name, value in by_label.items() if value >= 0.5]
        sure = min(max(value, 1 - value) for value in by_label.values())
        return Prediction(" + ".join(given) or "none", sure, by_label)

    def entropy(self, predicted: Tensor) -> Tensor:
        entropy: Tensor = (torch.special.entr(predicted) + torch.special.entr(1 - predicted)).sum(dim=1)
        return entropy

    def scores(self, classes: int, in_detail: bool = False) -> TaskScores:
        return LabelScores(classes, in_detail)

    def from_sums(self, record: Mapping[str, Any]) -> dict[str, float]:
        return label_measures(record)

    def problem_with_record(self, record: Any) -> str:
        return _RECORD.problem(record, None) or _problem_with_counts(record)

    def no_better(self, record: Mapping[str, Any]) -> bool:
        """Return True if no positive prediction is correct, or if accuracy is below the baseline."""
        if not record.get("count") or record["accuracy"] > record["majority_rate"] + 1e-9:
            return False
        return not sum(record["label_right"]) or bool(record["accuracy"] < record["majority_rate"])

    def compared_with_baseline(self, record: Mapping[str, Any]) -> str:
        return f"accuracy {100 * record['accuracy']:.1f} %, baseline {100 * record['majority_rate']:.1f} %"


class LabelScores(TaskScores):
    """Sums over test examples per label. A label is predicted if its probability is at least 0.5.

    >>> scores = LabelScores(labels=2)
    >>> scores.add(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([[1, 0], [0, 0]]))
    >>> scores.results()["exact_match"], scores.results()["accuracy"]
    (0.5, 0.75)
    """

    def __init__(self, labels: int, in_detail: bool = False) -> None:
        self.labels, self.in_detail = labels, in_detail
        self.count = self.exact = 0
        self.having, self.right, self.given = (torch.zeros(labels, dtype=torch.int64) for _ in range(3))
        self._kept: list[tuple[Tensor, Tensor]] = []

    def add(self, predicted: Tensor, targets: Tensor) -> None:
        """Add a batch of probabilities, shape (n, labels), with its targets of the same shape."""
        if predicted.shape != targets.shape or targets.shape[1:] != (self.labels,):
            raise DataError(
                f"Predictions of shape {tuple(predicted.shape)} do not match targets of shape {tuple(targets.shape)} and {self.labels} labels."
            )
        predicted, having = finite(predicted.detach().to("cpu", torch.float64)), targets.to("cpu") != 0
        require_probabilities(predicted)
        given = predicted >= 0.5
        self.count += len(having)
        self.exact += int((given == having).all(dim=1).sum())
        self.having += having.sum(dim=0)
        self.right += (given & having).sum(dim=0)
        self.given += given.sum(dim=0)
        if self.in_detail:
            self._kept.append((predicted.to(torch.float32), having))

    @property
    def main(self) -> float:
        """Macro F1."""
        return macro_f1(self.having.tolist(), self.right.tolist(), self.given.tolist())

    @property
    def auroc(self) -> float:
        """Mean area under the ROC curve, over labels with both positive and negative examples."""
        if not self._kept:
            return math.nan
        predicted, having = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        areas = [
            area_under_roc(predicted[:, place], having[:, place])
            for place in range(self.labels)
            if 0 < int(having[:, place].sum()) < self.count
        ]
        return ratio(sum(areas), len(areas))

    def results(self) -> dict[str, Any]:
        counts = dict(zip(COUNTS, (self.having.tolist(), self.right.tolist(), self.given.tolist()), strict=True))
        sums = {"count": self.count, "exact": self.exact, **counts}
        return plain({**label_measures(sums), "auroc": self.auroc}) | sums


def label_measures(record: Mapping[str, Any]) -> dict[str, float]:
    having, right, given = (record[name] for name in COUNTS)
    count, decisions = record["count"], record["count"] * len(having)
    wrong = sum(having) + sum(given) - 2 * sum(right)
    return {
        "macro_f1": macro_f1(having, right, given),
        "micro_f1": ratio(2 * sum(right), sum(having) + sum(given)),
        "accuracy": ratio(decisions - wrong, decisions),
        "exact_match": ratio(record["exact"], count),
        "majority_rate": ratio(sum(max(n, count - n) for n in having), decisions),
    }


def _problem_with_counts(record: Mapping[str, Any]) -> str:
    having, right, given = (record[name] for name in COUNTS)
    if not len(having) == len(right) == len(given):
        return "counts different numbers of labels"
    if any(max(n, a) > record["count"] or r > min(n, a) for n, r, a in zip(having, right, given, strict=True)):
        return "counts more predictions of a label than possible"
    return "" if record["exact"] <= record["count"] else "counts more exact predictions than examples"


_RECORD = Record(
    {
        **dict.fromkeys(("macro_f1", "micro_f1", "accuracy", "exact_match", "auroc", "majority_rate"), SHARE),
        "count": COUNT,
        "exact": COUNT,
        **dict.fromkeys(COUNTS, ListOf(COUNT, longest=1_000_000)),
    }
)
