"""Split examples depending only on their order, their labels and a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyfed.data.store.cache import Arrays
from polyfed.errors import OptionError

Positions: TypeAlias = NDArray[np.int64]

Splits: TypeAlias = Mapping[str, Positions]
"""Rows of a domain by split: train, test, and optionally validation."""


def check_share(owner: str, option: str, share: float) -> None:
    """Reject a fraction outside [0, 1)."""
    if not 0 <= share < 1:
        raise OptionError(f"{owner}: {option} must be at least 0 and below 1, got {share}.")


def without_end(positions: Positions, share: float) -> tuple[Positions, Positions]:
    """Split off the given fraction from the end."""
    taken = round(len(positions) * share)
    return positions[: len(positions) - taken], positions[len(positions) - taken :]


def with_validation(train: Positions, test: Positions, share: float) -> Splits:
    """Return the splits, with the given fraction from the end of the training rows for validation."""
    train, validation = without_end(train, share)
    return {"train": train, "validation": validation, "test": test}


def split_at_test(validation: float, arrays: Arrays) -> Splits:
    """Split rows at ``testing_from`` into training and test, with a fraction from the end of training for validation."""
    boundary = int(arrays["testing_from"])
    return with_validation(np.arange(boundary), np.arange(boundary, len(arrays["y"])), validation)


def in_turn(labels: NDArray[np.int64], train: Positions) -> Splits:
    """Assign the rows that are not for training alternately to validation and test, class by class."""
    rest = np.setdiff1d(np.arange(len(labels)), train)
    by_class = rest[np.argsort(labels[rest], kind="stable")]
    return {"train": train, "validation": np.sort(by_class[0::2]), "test": np.sort(by_class[1::2])}


def stratified(labels: NDArray[np.int64], share: float, seed: int) -> tuple[Positions, Positions]:
    """Draw a fraction of every class. Return the rest, shuffled, and the part, sorted.

    The part has ``ceil(share n)`` examples. Each class contributes its fraction rounded down, and the classes with the largest
    remainders one more. The rest keeps at least one example of every class; other classes contribute more instead. The result
    depends on the order of the labels.
    """
    random = np.random.default_rng([seed, len(labels)])
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * share
    take = np.floor(exact).astype(np.int64)
    missing = min(math.ceil(round(float(exact.sum()), 9)), int((counts - 1).sum())) - int(take.sum())
    by_remainder = np.argsort(-(exact - take), kind="stable")
    while missing > 0:
        open_classes = [place for place in by_remainder if take[place] < counts[place] - 1]
        for place in open_classes[:missing]:
            take[place] += 1
        missing -= min(missing, len(open_classes))
    part = [random.permutation(np.flatnonzero(labels == label))[:number] for label, number in zip(classes, take, strict=True)]
    taken = np.sort(np.concatenate(part)) if part else np.empty(0, np.int64)
    return random.permutation(np.setdiff1d(np.arange(len(labels)), taken)), taken


def grouped(labels: NDArray[np.int64], groups: NDArray[np.int64], share: float, seed: int) -> tuple[Positions, Positions]:
    """Draw about a fraction of every class without splitting groups (patients). Return the rest, shuffled, and the part, sorted.

    Groups are considered from largest to smallest, in random order for equal sizes. A group is taken if it brings the class counts
    closer to the fraction. The rest keeps at least one example of every class with more than one group.
    """
    random = np.random.default_rng([seed, len(labels)])
    _, y = np.unique(labels, return_inverse=True)
    ids, number = np.unique(groups, return_inverse=True)
    table = np.zeros((len(ids), y.max(initial=-1) + 1), np.int64)
    np.add.at(table, (number, y), 1)
    totals = table.sum(0)
    target, part, taken = totals * share, np.zeros(len(totals)), np.zeros(len(ids), np.bool_)
    shuffled = random.permutation(len(ids))
    by_size = shuffled[np.argsort(-table[shuffled].sum(1), kind="stable")]

    def distance(counts: NDArray[np.float64]) -> float:
        return float(((counts - target) ** 2 / totals).sum())

    allowed = [place for place in by_size if share > 0]
    for place in allowed:
        leaves_some = ((totals - part - table[place])[table[place] > 0] > 0).all()
        if leaves_some and distance(part + table[place]) < distance(part):
            part, taken[place] = part + table[place], True
    if not taken.any():
        spare = [place for place in allowed if ((totals - table[place])[table[place] > 0] > 0).all()]
        taken[spare[-1:]] = True
    chosen = taken[number]
    return random.permutation(np.flatnonzero(~chosen)), np.flatnonzero(chosen)
