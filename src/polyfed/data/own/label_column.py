"""Read a column of labels: one class per image, several labels separated by ``|``, or a number to predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polyfed.errors import DataError, OptionError
from polyfed.settings import AUTO
from polyfed.tasks.known import CLASSIFICATION, MULTILABEL, REGRESSION, task_named
from polyfed.tasks.task import Task

SEPARATOR = "|"
VALUE = "value"
"""Output name for numeric labels."""


@dataclass(frozen=True)
class LabelColumn:
    """The labels of a table, read for one task.

    Attributes:
        task: Task to learn.
        names: Names of the classes, labels or outputs.
        strata: Stratum of each image for random splits: its class, its set of labels, or a common value.
        targets: Target of each image, unless it is a class: a row of 0 and 1, or a number.
    """

    task: Task
    names: tuple[str, ...]
    strata: Sequence[str]
    targets: Sequence[tuple[float, ...]] = ()


def read_labels(labels: Sequence[str], task_name: str, where: str) -> LabelColumn:
    """Return the labels in the form that the task requires.

    Args:
        labels: Label of each image, as text.
        task_name: Name of the task, or ``auto`` to infer it from the labels.
        where: File name for error messages.
    """
    task = infer_task(labels) if task_name == AUTO else task_named(task_name)
    if task is CLASSIFICATION:
        _require_labels(labels, where)
        distinct = len(set(labels))
        if infer_task(labels) is REGRESSION and distinct > len(labels) / 2:
            raise DataError(
                f"{where}: the labels are fractional numbers with {distinct} distinct values in {len(labels)} images, which do not look "
                "like classes. Use --task regression, or group the values into classes."
            )
        return LabelColumn(task, tuple(sorted(set(labels), key=_sort_key)), labels)
    if task is MULTILABEL:
        sets = [sorted({part.strip() for part in label.split(SEPARATOR)} - {""}, key=_sort_key) for label in labels]
        names = tuple(sorted(set().union(*sets), key=_sort_key))
        if not names:
            raise DataError(f"{where}: no image has a label. Add labels to the table.")
        rows = [tuple(float(name in present) for name in names) for present in sets]
        return LabelColumn(task, names, [SEPARATOR.join(present) for present in sets], rows)
    if task is REGRESSION:
        _require_labels(labels, where)
        numbers = [(_number(label, f"{where}, line {line}"),) for line, label in enumerate(labels, 2)]
        return LabelColumn(task, (VALUE,), [VALUE] * len(labels), numbers)
    raise OptionError(f"{where}: a table of labels supports classification, multilabel and regression, not {task.name}.")


def infer_task(labels: Sequence[str]) -> Task:
    """Infer the task: multi-label if a label contains ``|``, regression if all are numbers and one is fractional, else classification.

    >>> infer_task(["cat", "cat|dog"]), infer_task(["1", "2.5"]), infer_task(["1", "2"])
    (<Task multilabel>, <Task regression>, <Task classification>)
    """
    if any(SEPARATOR in label for label in labels):
        return MULTILABEL
    try:
        return CLASSIFICATION if all(float(label).is_integer() for label in labels) else REGRESSION
    except (ValueError, OverflowError):
        return CLASSIFICATION


def _require_labels(labels: Sequence[str], where: str) -> None:
    if "" in labels:
        raise DataError(f"{where}, line {labels.index('') + 2}: the label is missing. Add a label or remove the line.")


def _number(text: str, where: str) -> float:
    try:
        found = float(text)
    except ValueError as error:
        raise DataError(f"{where}: the label {text!r} is not a number. Regression requires numbers.") from error
    if not math.isfinite(found):
        raise DataError(f"{where}: the label {text} is not finite. Regression requires finite numbers.")
    return found


def _sort_key(label: str) -> tuple[int, str]:
    return (int(label), "") if label.isdecimal() else (0, label)
