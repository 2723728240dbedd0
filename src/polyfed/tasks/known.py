"""All tasks: by name, by the targets of given data, and by the numbers in a score record."""

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
    """The task whose scores these are."""
    return next((task for task in TASKS.values() if task.mark in record), CLASSIFICATION)


def task_of_records(records: Mapping[tuple[str, str], Mapping[str, Any]]) -> Task:
    return next((task_of_record(record) for record in records.values()), CLASSIFICATION)


def pooled(many: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of several clients on one domain as those of one: sums add up, the rest is a mean by the number of test examples."""
    return task_of_record(many[0]).pooled(many)


def told_from(targets: Sequence[Tensor]) -> Task:
    """The task that targets of this kind are for; where several could be meant, an error that says how to choose."""
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
                f"Targets {kind_of(sample)} and hold whole numbers only, so they may be classes or measurements. For classes give whole "
                "numbers (y.long()); for measurements say --task regression."
            )
        return REGRESSION
    raise DataError(
        f"Targets {kind_of(sample)}, which no task has. "
        + " ".join(f"{task.name.capitalize()} takes {task.targets}." for task in TASKS.values())
    )


def task_for(asked: str, targets: Sequence[Tensor]) -> Task:
    """The task that was asked for, or the one that the targets are for."""
    return told_from(targets) if asked == AUTO else task_named(asked)


def require_same(asked: str, found: Task, name: str) -> None:
    """Refuse a task that the data are not for."""
    if asked not in (AUTO, found.name):
        raise SettingError(
            f"--task {asked} was asked for, but {name} is a data set for {found.name} ({found.targets}). Leave --task out."
        )


def require_measure(metric: str, task: Task) -> None:
    """Refuse a measure at the head of the tables that the task does not have."""
    if metric != AUTO and metric not in task.measures:
        raise SettingError(
            f"--metric {metric} ({MEASURES[metric]}) is no measure of {task.name}. There are: {', '.join(task.measures)}."
        )


def value_by(measure: str, numbers: Mapping[str, Any], client: str, view: str = "validation") -> float:
    """Return a metric from the scores of a client; rounds and settings are chosen by it."""
    if measure not in numbers:
        raise DataError(
            f"The scores of client {client} have no {MEASURES[measure]}: its {view} targets cannot tell models apart "
            "(all are equal, or there are none). Give it others, choose by another --metric, or choose the last round (--selection last)."
        )
    return float(numbers[measure])


def in_percent(task: Task) -> list[str]:
    """The measures of a task that are shares, and can be shown in percent."""
    return [name for name in task.measures if name not in IN_UNITS]
