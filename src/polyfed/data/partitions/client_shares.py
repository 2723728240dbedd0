"""Build clients from the training positions that a partition assigns to them.

A partition maps each client to its training positions per domain (a *holding*). This module adds the examples, the test sets of the
domains, and a fraction of the validation examples.
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
    """Return a separate NumPy generator for each purpose, so that draws never influence each other.

    Partitions use it. Its streams differ from those of ``polyfed.core.seeds``, which runs use.
    """
    if seed < 0:
        raise SettingError(f"The seed must be at least 0, got {seed}.")
    return np.random.default_rng([seed, *"\n".join(purpose).encode()])


def cut(positions: Positions, pieces: int) -> list[Positions]:
    """Return consecutive pieces whose sizes differ by at most one. Piece i ends before ``int(n (i+1) / pieces)``."""
    bounds = [len(positions) * piece // pieces for piece in range(pieces + 1)]
    return [positions[start:stop] for start, stop in pairwise(bounds)]


def numbered(stem: str, count: int) -> list[str]:
    """Return the names ``stem-00``, ``stem-01``, ..., padded so that they sort by number."""
    width = max(2, len(str(count - 1)))
    return [f"{stem}-{number:0{width}d}" for number in range(count)]


def check_min(partition: str, option: str, value: float, minimum: float) -> None:
    """Reject an option below its minimum."""
    if value < minimum:
        raise OptionError(f"{partition}: {option} must be at least {minimum}, got {value}.")


def pooled_labels(dataset: DataSet) -> NDArray[np.int64]:
    """Return all training labels in domain order. Reject a task without class labels."""
    dataset.task.require_class_labels("A partition by class")
    return np.concatenate([np.empty(0, np.int64), *(domain.train.labels.numpy() for domain in dataset.domains)])


def by_domain(dataset: DataSet, pooled: Positions) -> dict[str, Positions]:
    """Convert positions in the union of all domains to positions in each domain."""
    starts = np.cumsum([0, *(len(domain.train) for domain in dataset.domains)])
    holding: dict[str, Positions] = {}
    for domain, start, stop in zip(dataset.domains, starts[:-1], starts[1:], strict=True):
        inside = pooled[(pooled >= start) & (pooled < stop)] - start
        if len(inside):
            holding[domain.name] = inside
    return holding


def clients_of(dataset: DataSet, holdings: Mapping[str, Holding], seed: int) -> tuple[ClientData, ...]:
    """Return clients with these training positions, the test sets of their domains, and part of the validation examples.

    The seed determines how validation examples are split.
    """
    holdings = {client: {name: part for name, part in holding.items() if len(part)} for client, holding in holdings.items()}
    empty = [client for client, holding in holdings.items() if not holding]
    if empty:
        shown = ", ".join(empty[:10]) + (f" and {len(empty) - 10} more" if len(empty) > 10 else "")
        raise DataError(
            f"{dataset.name}: no training data is left for {len(empty)} of {len(holdings)} clients: {shown}. "
            "Use fewer clients or a different partition."
        )
    validations = _validations(dataset, holdings, seed)
    return tuple(
        ClientData(
            id=client,
            domains=tuple(domain.name for domain in dataset.domains if domain.name in holding),
            train=_select(dataset, holding, "train"),
            tests={domain.name: domain.test for domain in dataset.domains if domain.name in holding},
            validation=_select(dataset, validations[client], "validation") if validations[client] else None,
        )
        for client, holding in holdings.items()
    )


def _select(dataset: DataSet, holding: Holding, split: str) -> Examples:
    parts: list[Examples] = []
    for domain in dataset.domains:
        if domain.name in holding:
            examples: Examples = getattr(domain, split)
            parts.append(examples.subset(torch.from_numpy(np.sort(holding[domain.name]))))
    return joined(parts)


def _validations(dataset: DataSet, holdings: Mapping[str, Holding], seed: int) -> dict[str, dict[str, Positions]]:
    """Return the validation positions of each client by domain, without empty parts."""
    found: dict[str, dict[str, Positions]] = {client: {} for client in holdings}
    for domain in dataset.domains:
        holders = [client for client, holding in holdings.items() if domain.name in holding]
        if domain.validation is None or not holders:
            continue
        parts = _split_validation(domain, dataset.task, [holdings[client][domain.name] for client in holders], seed)
        for client, part in zip(holders, parts, strict=True):
            if len(part):
                found[client][domain.name] = part
    return found


def _split_validation(domain: Domain, task: Task, holders: Sequence[Positions], seed: int) -> list[Positions]:
    """Split validation positions by class, in proportion to the training examples of each client.

    ``holders`` has the training positions of each client that trains on the domain.
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
        # Use a new client order for each class, because with a fixed order rounding would always favour the same clients.
        order = random.permutation(len(holders))
        bounds = np.rint(np.cumsum(counts[order]) / counts.sum() * len(positions)).astype(np.int64)
        for holder, piece in zip(order, np.split(positions, bounds[:-1]), strict=True):
            parts[holder].append(piece)
    return [np.sort(np.concatenate(part)) if part else np.empty(0, np.int64) for part in parts]
