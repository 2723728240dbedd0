"""The share of the data that each client gets: cutting, drawing, and turning positions into clients. All partitions use it.

A partition says, for each client, which training positions of which domain it gets (a *holding*).
This module gives each client its examples, the test sets of its domains, and its share of validation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.data_types import ClientData, DataSet, Domain, Examples, joined
from polyfed.data.store.splits import Positions
from polyfed.errors import DataError, OptionError, SettingError
from polyfed.tasks.task import Task

Holding: TypeAlias = Mapping[str, Positions]
"""Training positions by domain name."""


def numpy_generator(seed: int, *purpose: str) -> np.random.Generator:
    """A NumPy generator of its own for each purpose, so that one draw never moves another.

    Partitions draw from it. Its streams are not those of ``polyfed.core.seeds``, from which runs draw.
    """
    if seed < 0:
        raise SettingError(f"The seed is {seed}; it must be 0 or larger.")
    return np.random.default_rng([seed, *"\n".join(purpose).encode()])


def cut(positions: Positions, pieces: int) -> list[Positions]:
    """Consecutive pieces whose sizes differ by at most one; piece i ends before ``int(n (i+1) / pieces)``."""
    bounds = [len(positions) * piece // pieces for piece in range(pieces + 1)]
    return [positions[start:stop] for start, stop in pairwise(bounds)]


def numbered(stem: str, count: int) -> list[str]:
    """Names ``stem-00``, ``stem-01``, ... that sort in the order of their numbers."""
    width = max(2, len(str(count - 1)))
    return [f"{stem}-{number:0{width}d}" for number in range(count)]


def at_least(partition: str, option: str, value: float, least: float) -> None:
    """Refuse an option below its least value."""
    if value < least:
        raise OptionError(f"{partition}: {option} is {value}; it must be at least {least}.")


def pooled_labels(dataset: DataSet) -> NDArray[np.int64]:
    """All training labels, domain after domain; a task that has none is refused."""
    dataset.task.require_class_labels("A partition by class")
    return np.concatenate([np.empty(0, np.int64), *(domain.train.labels.numpy() for domain in dataset.domains)])


def by_domain(dataset: DataSet, pooled: Positions) -> dict[str, Positions]:
    """Turn positions in the union of all domains into positions in each domain."""
    starts = np.cumsum([0, *(len(domain.train) for domain in dataset.domains)])
    holding: dict[str, Positions] = {}
    for domain, start, stop in zip(dataset.domains, starts[:-1], starts[1:], strict=True):
        inside = pooled[(pooled >= start) & (pooled < stop)] - start
        if len(inside):
            holding[domain.name] = inside
    return holding


def clients_of(dataset: DataSet, holdings: Mapping[str, Holding], seed: int) -> tuple[ClientData, ...]:
    """Clients that hold these positions, with the tests of their domains and their share of validation.

    Args:
        dataset: The data to split.
        holdings: What each client gets, by client id.
        seed: Decides who gets which validation example.
    """
    holdings = {client: {name: part for name, part in holding.items() if len(part)} for client, holding in holdings.items()}
    empty = [client for client, holding in holdings.items() if not holding]
    if empty:
        shown = ", ".join(empty[:10]) + (f" and {len(empty) - 10} more" if len(empty) > 10 else "")
        raise DataError(
            f"{dataset.name}: no training data are left for {len(empty)} of {len(holdings)} clients: {shown}. "
            "Use fewer clients or another partition."
        )
    validations = _validations(dataset, holdings, seed)
    return tuple(
        ClientData(
            id=client,
            domains=tuple(domain.name for domain in dataset.domains if domain.name in holding),
            train=_taken(dataset, holding, "train"),
            tests={domain.name: domain.test for domain in dataset.domains if domain.name in holding},
            validation=_taken(dataset, validations[client], "validation") if validations[client] else None,
        )
        for client, holding in holdings.items()
    )


def _taken(dataset: DataSet, holding: Holding, split: str) -> Examples:
    """The examples of a holding, in the order of the data set."""
    parts: list[Examples] = []
    for domain in dataset.domains:
        if domain.name in holding:
            examples: Examples = getattr(domain, split)
            parts.append(examples.subset(torch.from_numpy(np.sort(holding[domain.name]))))
    return joined(parts)


def _validations(dataset: DataSet, holdings: Mapping[str, Holding], seed: int) -> dict[str, dict[str, Positions]]:
    """Each client's validation positions by domain; empty parts are left out."""
    shares: dict[str, dict[str, Positions]] = {client: {} for client in holdings}
    for domain in dataset.domains:
        holders = [client for client, holding in holdings.items() if domain.name in holding]
        if domain.validation is None or not holders:
            continue
        parts = _split_validation(domain, dataset.task, [holdings[client][domain.name] for client in holders], seed)
        for client, part in zip(holders, parts, strict=True):
            if len(part):
                shares[client][domain.name] = part
    return shares


def _split_validation(domain: Domain, task: Task, holders: Sequence[Positions], seed: int) -> list[Positions]:
    """Validation positions for each holder, class by class in proportion to its training examples of that class.

    Args:
        domain: The domain whose validation examples are split.
        task: What is learnt; it says of which class each example is.
        holders: The training positions of each client that holds some.
        seed: Decides who gets which example.
    """
    assert domain.validation is not None
    if len(holders) == 1:
        return [np.arange(len(domain.validation))]
    random = numpy_generator(seed, "validation", domain.name)
    train, labels = task.strata(domain.train).numpy(), task.strata(domain.validation).numpy()
    columns = 1 + max(train.max(), labels.max(initial=0))
    table = np.stack([np.bincount(train[part], minlength=columns) for part in holders])
    parts: list[list[Positions]] = [[] for _ in holders]
    for label in np.unique(labels):
        counts = table[:, label] if table[:, label].any() else table.sum(axis=1)
        positions = random.permutation(np.flatnonzero(labels == label))
        # A new order of holders for each class: in one order, rounding would favour the same holders every time.
        order = random.permutation(len(holders))
        bounds = np.rint(np.cumsum(counts[order]) / counts.sum() * len(positions)).astype(np.int64)
        for holder, piece in zip(order, np.split(positions, bounds[:-1]), strict=True):
            parts[holder].append(piece)
    return [np.sort(np.concatenate(part)) if part else np.empty(0, np.int64) for part in parts]
