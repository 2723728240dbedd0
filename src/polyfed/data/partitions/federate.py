"""Turn a data set into a federation: split some domains across clients, and hold out others for testing."""

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
    """Split a data set across clients, and hold out the unseen domains.

    Args:
        dataset: The data.
        partition: Expression of a registered partition.
        unseen: Names of the domains to hold out.
        seed: Seed of the partition and the few-shot examples.
        few_shot: Number of training examples per unseen domain that every client receives additionally, without overlap.
        unseen_part: "test" evaluates an unseen domain on its test set, "all" on all of its examples except few-shot examples.
    """
    if unseen_part not in ("test", "all"):
        raise OptionError(f"unseen_part must be 'test' or 'all', got {unseen_part!r}.")
    if few_shot < 0 or (few_shot and not unseen):
        raise OptionError(f"few_shot must be at least 0 and requires at least one unseen domain, got {few_shot}.")
    names = dict.fromkeys([unseen] if isinstance(unseen, str) else unseen)
    targets = [dataset.domain(name) for name in names]
    seen = replace(dataset, domains=tuple(part for part in dataset.domains if part.name not in names))
    if not seen.domains:
        raise DataError(f"{dataset.name}: all domains are unseen ({', '.join(names)}). Leave at least one domain seen.")
    clients: tuple[ClientData, ...] = partitions.build(partition, dataset=seen, seed=seed)
    tested: dict[str, Examples] = {}
    for target in targets:
        shots, rest = _few_shots(target, len(clients), few_shot, seed)
        tested[target.name] = target.test if unseen_part == "test" else whole_domain(target, rest)
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
    """Return the training positions for each client, and the remaining positions."""
    total = len(target.train)
    if clients * shots > total:
        raise DataError(
            f"few_shot: {clients} clients with {shots} examples each need {clients * shots} training examples of {target.name}, "
            f"which has {total}. Use at most {total // clients} per client."
        )
    shuffled = numpy_generator(seed, "few_shot", target.name).permutation(total)
    return [np.sort(shuffled[client * shots : (client + 1) * shots]) for client in range(clients)], np.sort(
        shuffled[clients * shots :]
    )


def whole_domain(target: Domain, training: Positions | None = None) -> Examples:
    """Return all examples of a domain, optionally with only some of its training positions."""
    rows = np.arange(len(target.train)) if training is None else training
    parts = [target.train.subset(torch.from_numpy(rows)), target.validation, target.test]
    return joined([part for part in parts if part is not None and len(part)])
