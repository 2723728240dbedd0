"""What a column of labels means: one class for each image, several labels apart by ``|``, or a number to predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from polyfed.errors import DataError, OptionError
from polyfed.settings import AUTO
from polyfed.tasks.known import CLASSIFICATION, MULTILABEL, REGRESSION, task_named
from polyfed.tasks.task import Task

APART = "|"
VALUE = "value"
"""The name of the one output where labels are numbers."""


@dataclass(frozen=True)
class LabelColumn:
    """The labels of a table, read for one task.

    Args:
        task: What is learnt.
        names: The classes, labels or outputs.
        strata: For each image what a random split takes equal shares of: its class, its labels together, or one for all.
        targets: The target of each image, where it is not its class: a row of 0 and 1, or a number.
    """

    task: Task
    names: tuple[str, ...]
    strata: Sequence[str]
    targets: Sequence[tuple[float, ...]] = ()


def read_labels(labels: Sequence[str], asked: str, where: str) -> LabelColumn:
    """The labels as a task takes them.

    Args:
        labels: The text of each.
        asked: The task, or ``auto``: as the labels tell.
        where: What holds them, for messages.
    """
    task = told_from(labels) if asked == AUTO else task_named(asked)
    if task is CLASSIFICATION:
        _require_some(labels, where)
        different = len(set(labels))
        if told_from(labels) is REGRESSION and different > len(labels) / 2:
            raise DataError(
                f"{where}: the labels are numbers with fractions, {different} different ones of {len(labels)} images, so they are hardly "
                "classes. Use --task regression, or put them into classes."
            )
        return LabelColumn(task, tuple(sorted(set(labels), key=_in_order)), labels)
    if task is MULTILABEL:
        sets = [sorted({part.strip() for part in label.split(APART)} - {""}, key=_in_order) for label in labels]
        names = tuple(sorted({name for own in sets for name in own}, key=_in_order))
        if not names:
            raise DataError(f"{where}: no image has a label.")
        rows = [tuple(float(name in own) for name in names) for own in sets]
        return LabelColumn(task, names, [APART.join(own) for own in sets], rows)
    if task is REGRESSION:
        _require_some(labels, where)
        numbers = [(_number(label, f"{where}, line {line}"),) for line, label in enumerate(labels, 2)]
        return LabelColumn(task, (VALUE,), [VALUE] * len(labels), numbers)
    raise OptionError(f"{where}: a table of labels is for classification, multilabel or regression, not for {task.name}.")


def told_from(labels: Sequence[str]) -> Task:
    """Several labels where one of them holds ``|``, numbers to predict where all are numbers and one has a fraction; else classes.

    >>> told_from(["cat", "cat|dog"]), told_from(["1", "2.5"]), told_from(["1", "2"])
    (<Task multilabel>, <Task regression>, <Task classification>)
    """
    if any(APART in label for label in labels):
        return MULTILABEL
    try:
        return CLASSIFICATION if all(float(label).is_integer() for label in labels) else REGRESSION
    except (ValueError, OverflowError):
        return CLASSIFICATION


def _require_some(labels: Sequence[str], where: str) -> None:
    if "" in labels:
        raise DataError(f"{where}, line {labels.index('') + 2}: no label.")


def _number(text: str, where: str) -> float:
    try:
        found = float(text)
    except ValueError as error:
        raise DataError(f"{where}: the label is {text!r}, and regression takes numbers.") from error
    if not math.isfinite(found):
        raise DataError(f"{where}: the label is {text}, and regression takes finite numbers.")
    return found


def _in_order(label: str) -> tuple[int, str]:
    """Labels that are numbers come in the order of numbers."""
    return (int(label), "") if label.isdecimal() else (0, label)
