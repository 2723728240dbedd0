"""``federate`` turns a data set into a federation: a partition splits some domains among clients, others are set aside for testing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from polyfed.core.data_types import ClientData, DataSet, Domain, Examples, Federation, joined
from polyfed.data.partitions.client_shares import numpy_generator
from polyfed.data.registry import partitions
from polyfed.data.store.splits import Positions
from polyfed.errors import DataError, OptionError


def federate(
    dataset: DataSet,
    partition: str = "domain",
    unseen: Sequence[str] = (),
    seed: int = 0,
    few_shot: int = 0,
    unseen_part: str = "test",
) -> Federation:
    """Split a data set among clients and set aside the domains nobody trains on.

    Args:
        dataset: The data.
        partition: The text of a registered partition.
        unseen: Names of the domains to set aside.
        seed: Decides all draws of the partition and the few shots.
        few_shot: Training examples of each unseen domain that every client gets on top; no two clients get the same ones.
        unseen_part: "test" tests an unseen domain on its test set, "all" on everything it has (few shots excepted).
    """
    if unseen_part not in ("test", "all"):
        raise OptionError(f"unseen_part is {unseen_part!r}; it must be 'test' or 'all'.")
    if few_shot < 0 or (few_shot and not unseen):
        raise OptionError(f"few_shot is {few_shot}; it must be 0 or larger, and needs at least one unseen domain.")
    names = dict.fromkeys([unseen] if isinstance(unseen, str) else unseen)
    targets = [dataset.domain(name) for name in names]
    seen = replace(dataset, domains=tuple(part for part in dataset.domains if part.name not in names))
    if not seen.domains:
        raise DataError(f"{dataset.name}: all domains are unseen ({', '.join(names)}). Leave at least one domain seen.")
    clients: tuple[ClientData, ...] = partitions.build(partition, dataset=seen, seed=seed)
    tested: dict[str, Examples] = {}
    for target in targets:
        shots, rest = _few_shots(target, len(clients), few_shot, seed)
        tested[target.name] = target.test if unseen_part == "test" else _whole(target, rest)
        if few_shot:
            clients = tuple(
                replace(client, train=joined([client.train, target.train.subset(torch.from_numpy(shot))]))
                for client, shot in zip(clients, shots, strict=True)
            )
    return Federation(
        name=dataset.name,
        classes=dataset.classes,
        clients=clients,
        unseen=tested,
        preparation=dataset.preparation,
        default_model=dataset.default_model,
        trains_with=dataset.trains_with,
        source=dataset.source,
        notes=dataset.notes,
        task=dataset.task,
    )


def _few_shots(target: Domain, clients: int, shots: int, seed: int) -> tuple[list[Positions], Positions]:
    """Training positions for each client, and those that nobody gets."""
    total = len(target.train)
    if clients * shots > total:
        raise DataError(
            f"few_shot: {clients} clients with {shots} examples each need {clients * shots} training examples of {target.name}, "
            f"which has {total}. Use at most {total // clients}."
        )
    shuffled = numpy_generator(seed, "few_shot", target.name).permutation(total)
    return [np.sort(shuffled[client * shots : (client + 1) * shots]) for client in range(clients)], np.sort(
        shuffled[clients * shots :]
    )


def whole_domain(target: Domain) -> Examples:
    """Everything a domain has."""
    return _whole(target, np.arange(len(target.train)))


def _whole(target: Domain, training: Positions) -> Examples:
    """Everything a domain has, with only these of its training positions."""
    parts = [target.train.subset(torch.from_numpy(training)), target.validation, target.test]
    return joined([part for part in parts if part is not None and len(part)])
