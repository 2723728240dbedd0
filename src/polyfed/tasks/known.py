"""Find a task by name, by targets, or by score record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.errors import DataError, SettingError, UnknownName, nearest
from polyfed.settings import AUTO
from polyfed.tasks.classification import Classification
from polyfed.tasks.metrics import IN_UNITS, MEASURES
from polyfed.tasks.multilabel import MultiLabel
from polyfed.tasks.regression import Regression
from polyfed.tasks.segmentation import Segmentation
from polyfed.tasks.task import WHOLE, Task, kind_of

CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION = Classification(), MultiLabel(), Regression(), Segmentation()
TASKS: Mapping[str, Task] = {task.name: task for task in (CLASSIFICATION, MULTILABEL, REGRESSION, SEGMENTATION)}


def task_named(name: str) -> Task:
    if name not in TASKS:
        raise UnknownName(f"There is no task {name!r}. {nearest(name, TASKS)}")
    return TASKS[name]


def task_of_record(record: Mapping[str, Any]) -> Task:
    return next((task for task in TASKS.values() if task.mark in record), CLASSIFICATION)


def task_of_records(records: Mapping[tuple[str, str], Mapping[str, Any]]) -> Task:
    return next((task_of_record(record) for record in records.values()), CLASSIFICATION)


def pooled(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the scores of several clients on one domain: sum the counts, average the rest by number of test examples."""
    return task_of_record(many[0]).pooled(many)


def infer_task(targets: Sequence[Tensor]) -> Task:
    """Infer the task from the targets. Raise ``DataError`` if they are ambiguous."""
    kinds = {(part.dim(), part.dtype in (*WHOLE, torch.bool)) for part in targets}
    if len(kinds) > 1:
        raise DataError(
            f"Some targets {kind_of(targets[0])}, others {kind_of(next(t for t in targets if t.dim() != targets[0].dim() or t.dtype != targets[0].dtype))}. "
            "All domains need targets of one kind."
        )
    sample = targets[0]
    if sample.dim() == 1 and sample.dtype in WHOLE:
        return CLASSIFICATION
    if sample.dim() == 3 and sample.dtype in WHOLE:
        return SEGMENTATION
    if sample.dim() == 2 and all(not MULTILABEL.problem(part) for part in targets):
        return MULTILABEL
    if sample.is_floating_point() and sample.dim() in (1, 2):
        if sample.dim() == 1 and all(bool((part == part.round()).all()) for part in targets):
            raise DataError(
                f"Targets {kind_of(sample)} with integer values, so they may be classes or measurements. For classes, pass integers "
                "(y.long()). For measurements, use --task regression."
            )
        return REGRESSION
    raise DataError(
        f"Targets {kind_of(sample)}, which no task supports. "
        + " ".join(f"{task.name.capitalize()} needs {task.targets}." for task in TASKS.values())
    )


def task_for(asked: str, targets: Sequence[Tensor]) -> Task:
    return infer_task(targets) if asked == AUTO else task_named(asked)


def require_same(asked: str, found: Task, name: str) -> None:
    """Raise ``SettingError`` if the requested task does not match the data."""
    if asked not in (AUTO, found.name):
        raise SettingError(f"--task {asked} does not match {name}, a data set for {found.name} ({found.targets}). Remove --task.")


def require_measure(metric: str, task: Task) -> None:
    """Raise ``SettingError`` if the task does not have the metric."""
    if metric != AUTO and metric not in task.measures:
        raise SettingError(
            f"--metric {metric} ({MEASURES[metric]}) is not a metric of {task.name}. Choose from: {', '.join(task.measures)}."
        )


def value_by(measure: str, numbers: Mapping[str, Any], client: str, view: str = "validation") -> float:
    """Return the metric that selects rounds and settings, from the scores of a client."""
    if measure not in numbers:
        raise DataError(
            f"The scores of client {client} have no {MEASURES[measure]}: its {view} targets cannot distinguish models "
            "(all are equal, or there are none). Use other targets, a different --metric, or the last round (--selection last)."
        )
    return float(numbers[measure])


def in_percent(task: Task) -> list[str]:
    """Return the metrics of a task that are fractions and can be shown in percent."""
    return [name for name in task.measures if name not in IN_UNITS]
