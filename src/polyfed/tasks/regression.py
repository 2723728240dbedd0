"""Regression: every example has one real number, or several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import DataError
from polyfed.extras import LARGEST, ListOf, Number, Record
from polyfed.tasks.metrics import ratio
from polyfed.tasks.task import COUNT, Prediction, Task, TaskScores, finite, kind_of, plain

SUMS = ("absolute_errors", "squared_errors", "target_sums", "target_squares")
"""Per output: sums of absolute errors, squared errors, targets and squared targets."""


class Regression(Task):
    """Every example has one real number, or several."""

    name = "regression"
    noun = "output"
    targets = "one real number per example, or a row of them"
    default_loss = "squared_error"
    measures = ("r2", "mean_absolute_error", "root_mean_squared_error")
    mark = "squared_errors"
    baseline = "always predicting the mean"
    min_main = -LARGEST

    def problem(self, targets: Tensor, classes: int | None = None) -> str:
        if targets.dim() not in (1, 2) or targets.dtype is torch.bool or targets.is_complex():
            return kind_of(targets)
        if not bool(targets.isfinite().all()):
            return "contain values that are not finite"
        width = self.width([targets])
        return "" if classes is None or width == classes else f"have {width} columns, but there are {classes} outputs"

    def width(self, targets: Sequence[Tensor]) -> int:
        return 1 if targets[0].dim() == 1 else int(targets[0].shape[1])

    def for_loss(self, y: Tensor) -> Tensor:
        return y.to(torch.float32).reshape(len(y), -1)

    def blank_targets(self, samples: int, class_counts: Sequence[int], classes: int, input_shape: Sequence[int]) -> Tensor:
        return torch.zeros(samples, classes)

    def predicted(self, outputs: Tensor) -> Tensor:
        return outputs

    def answer(self, predicted: Tensor, classes: Sequence[str]) -> Prediction:
        values = {name: float(value) for name, value in zip(classes, predicted, strict=True)}
        return Prediction(", ".join(f"{value:.4g}" for value in values.values()), math.nan, values)

    def scores(self, classes: int, in_detail: bool = False) -> TaskScores:
        return ErrorSums(classes, in_detail)

    def from_sums(self, record: Mapping[str, Any]) -> dict[str, float]:
        return error_measures(record)

    def problem_with_record(self, record: Any) -> str:
        if problem := _RECORD.problem(record, None):
            return problem
        return "" if len({len(record[name]) for name in SUMS}) == 1 else "sums over different numbers of outputs"

    def no_better(self, record: Mapping[str, Any]) -> bool:
        """Return True if R² is not above 0."""
        return bool(record.get("r2", 1.0) <= 0)

    def compared_with_baseline(self, record: Mapping[str, Any]) -> str:
        return f"R² {record['r2']:.3f}"


class ErrorSums(TaskScores):
    """Sums of errors and targets per output.

    >>> scores = ErrorSums(outputs=1)
    >>> scores.add(torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0]))
    >>> scores.results()["r2"], scores.results()["mean_absolute_error"]
    (0.5, 0.5)
    """

    def __init__(self, outputs: int, in_detail: bool = False) -> None:
        self.outputs, self.in_detail = outputs, in_detail
        self.count = 0
        self.sums = torch.zeros(len(SUMS), outputs, dtype=torch.float64)

    def add(self, predicted: Tensor, targets: Tensor) -> None:
        """Add a batch of predictions, shape (n, outputs), with its targets."""
        targets = targets.to("cpu", torch.float64).reshape(len(targets), -1)
        if predicted.shape != targets.shape or targets.shape[1] != self.outputs:
            raise DataError(
                f"Predictions of shape {tuple(predicted.shape)} do not match targets of shape {tuple(targets.shape)} and "
                f"{self.outputs} outputs."
            )
        errors = finite(predicted.detach().to("cpu", torch.float64)) - targets
        self.count += len(targets)
        self.sums += torch.stack([part.sum(dim=0) for part in (errors.abs(), errors.square(), targets, targets.square())])

    @property
    def main(self) -> float:
        """R², or minus the root mean squared error if all targets are equal and R² is undefined."""
        found = error_measures(self._record())
        return -found["root_mean_squared_error"] if math.isnan(found["r2"]) else found["r2"]

    def _record(self) -> dict[str, Any]:
        return {"count": self.count, **dict(zip(SUMS, self.sums.tolist(), strict=True))}

    def results(self) -> dict[str, Any]:
        return plain(error_measures(self._record())) | self._record()


def error_measures(record: Mapping[str, Any]) -> dict[str, float]:
    """Compute the metrics from the sums. R² is the mean over outputs with different targets; errors are over all outputs."""
    count = record["count"]
    absolute, squared, sums, squares = (record[name] for name in SUMS)
    shares = [
        1 - error / total
        for error, own, square in zip(squared, sums, squares, strict=True)
        if count and (total := square - own**2 / count) > 1e-12 * max(square, 1e-30)
    ]
    return {
        "r2": ratio(sum(shares), len(shares)),
        "mean_absolute_error": ratio(sum(absolute), count * len(absolute)),
        "root_mean_squared_error": math.sqrt(ratio(sum(squared), count * len(squared))) if count else math.nan,
    }


_POSITIVE = ListOf(Number(0, LARGEST), longest=100_000)
_RECORD = Record(
    {
        "r2": Number(-LARGEST, 1.001, required=False),
        **dict.fromkeys(("mean_absolute_error", "root_mean_squared_error"), Number(0, LARGEST, required=False)),
        "count": COUNT,
        **dict.fromkeys(("absolute_errors", "squared_errors", "target_squares"), _POSITIVE),
        "target_sums": ListOf(Number(), longest=100_000),
    }
)
