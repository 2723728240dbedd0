"""Partitions, which split the domains of a data set across the clients of a federation.

Every training example belongs to exactly one client. A partition is an expression such as ``domain_even(clients=20)`` or
``dirichlet(clients=100, alpha=0.1)``; the run supplies data and seed. flwr-datasets is not used, because it partitions Hugging Face data
sets, not tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.data_types import ClientData, DataSet
from polyfed.data.partitions.client_shares import by_domain, check_min, clients_of, cut, numbered, numpy_generator, pooled_labels
from polyfed.data.partitions.federate import federate
from polyfed.data.partitions.label_skew import per_class_counts, per_client_counts, positions_of, shard_counts
from polyfed.data.registry import partitions
from polyfed.data.store.splits import Positions, check_share, grouped
from polyfed.errors import DataError, OptionError

__all__ = ["dirichlet", "domain", "domain_even", "domain_parts", "domain_split", "federate", "iid", "natural", "shards"]


def domain(dataset: DataSet, seed: int) -> tuple[ClientData, ...]:
    """Create one client per domain, with the name of the domain.

    Args:
        dataset: The data to split.
        seed: Not used, because nothing is drawn.
    """
    return tuple(
        ClientData(id=part.name, domains=(part.name,), train=part.train, tests={part.name: part.test}, validation=part.validation)
        for part in dataset.domains
    )


def domain_even(dataset: DataSet, seed: int, clients: int = 20) -> tuple[ClientData, ...]:
    """Shuffle each domain and split it into clients of equal size. Five domains with 20 clients each yield 100 clients.

    Args:
        dataset: The data to split.
        seed: Seed of the shuffle.
        clients: Clients per domain.
    """
    check_min("domain_even", "clients", clients, 1)
    holdings = {}
    for part in dataset.domains:
        shuffled = numpy_generator(seed, "domain_even", part.name).permutation(len(part.train))
        for client, piece in zip(numbered(part.name, clients), cut(shuffled, clients), strict=True):
            holdings[client] = {part.name: piece}
    return clients_of(dataset, holdings, seed)


def domain_parts(dataset: DataSet, seed: int, parts: int = 2, out_of: int = 0) -> tuple[ClientData, ...]:
    """Split each domain in its given order into consecutive parts of equal size. Each part is a client.

    For Digits-Five with 7,438 examples per domain, ``out_of=10`` yields the parts of the FedBN authors (743 or 744 examples). The
    first ``parts`` of them become clients, and the rest is not used.

    Args:
        dataset: The data to split.
        seed: Seed of the validation split.
        parts: Clients per domain.
        out_of: Number of parts that a domain is split into; 0 means ``parts``, so that all examples are used.
    """
    check_min("domain_parts", "parts", parts, 1)
    pieces = out_of or parts
    check_min("domain_parts", "out_of", pieces, parts)
    holdings = {}
    for part in dataset.domains:
        cuts = cut(np.arange(len(part.train)), pieces)[:parts]
        for client, piece in zip(numbered(part.name, parts), cuts, strict=True):
            holdings[client] = {part.name: piece}
    return clients_of(dataset, holdings, seed)


def iid(dataset: DataSet, seed: int, clients: int) -> tuple[ClientData, ...]:
    """Pool and shuffle all domains, and split them into clients of equal size.

    Args:
        dataset: The data to split.
        seed: Seed of the shuffle.
        clients: Number of clients.
    """
    check_min("iid", "clients", clients, 1)
    total = sum(len(part.train) for part in dataset.domains)
    return _from_union(dataset, cut(numpy_generator(seed, "iid").permutation(total), clients), seed)


def dirichlet(
    dataset: DataSet, seed: int, clients: int, alpha: float, rule: str = "per_class", minimum: int = 10
) -> tuple[ClientData, ...]:
    """Pool all domains, and split them with label skew from a Dirichlet distribution.

    Args:
        dataset: The data to split.
        seed: Seed of all draws.
        clients: Number of clients.
        alpha: Concentration. Small values yield few classes per client.
        rule: "per_class" draws the proportions of each class over the clients; "per_client" draws the proportions of each client
            over the classes, with the same number of examples for all clients.
        minimum: Smallest number of examples per client.
    """
    check_min("dirichlet", "clients", clients, 1)
    check_min("dirichlet", "minimum", minimum, 1)
    if not alpha > 0:
        raise OptionError(f"dirichlet: alpha must be greater than 0, got {alpha}.")
    if rule not in ("per_class", "per_client"):
        raise OptionError(f"dirichlet: rule must be 'per_class' or 'per_client', got {rule!r}.")
    labels = pooled_labels(dataset)
    if len(labels) < clients * minimum:
        raise DataError(
            f"dirichlet: {dataset.name} has {len(labels)} training examples, too few for {clients} clients "
            f"with at least {minimum} each. Use fewer clients or a smaller minimum."
        )
    present, totals = np.unique(labels, return_counts=True)
    random = numpy_generator(seed, "dirichlet", rule)
    if rule == "per_class":
        counts = per_class_counts(totals, clients, alpha, minimum, random)
    else:
        counts = per_client_counts(totals, clients, alpha, random)
    return _from_union(dataset, positions_of(labels, counts, present, random), seed)


def shards(dataset: DataSet, seed: int, clients: int, classes_per_client: int = 2) -> tuple[ClientData, ...]:
    """Pool all domains and cut each class into shards. Every client receives shards of the same number of classes.

    Args:
        dataset: The data to split.
        seed: Seed of all draws.
        clients: Number of clients.
        classes_per_client: Number of classes per client.
    """
    check_min("shards", "clients", clients, 1)
    check_min("shards", "classes_per_client", classes_per_client, 1)
    labels = pooled_labels(dataset)
    present, totals = np.unique(labels, return_counts=True)
    if not classes_per_client <= len(present) <= clients * classes_per_client:
        raise DataError(
            f"shards: {clients} clients with {classes_per_client} classes each do not cover the {len(present)} classes "
            f"of {dataset.name}. Use 1 to {len(present)} classes per client, and clients x classes of at least {len(present)}."
        )
    random = numpy_generator(seed, "shards")
    counts = shard_counts(totals, clients, classes_per_client, random)
    return _from_union(dataset, positions_of(labels, counts, present, random), seed)


def natural(dataset: DataSet, seed: int) -> tuple[ClientData, ...]:
    """Create one client per natural id (patient, writer, device) of each domain.

    Args:
        dataset: The data to split. Its domains need ``groups``.
        seed: Seed of the validation split.
    """
    holdings = {}
    for part in dataset.domains:
        if part.groups is None:
            raise DataError(
                f"natural: domain {part.name} of {dataset.name} has no natural ids. Use a different partition, such as domain."
            )
        if len(part.groups) != len(part.train):
            raise DataError(
                f"natural: domain {part.name} has {len(part.train)} training examples but {len(part.groups)} natural ids."
            )
        order = np.argsort(part.groups.numpy(), kind="stable")
        ids, starts = np.unique(part.groups.numpy()[order], return_index=True)
        for group, positions in zip(ids, np.split(order, starts[1:]), strict=True):
            holdings[f"{part.name}-{group}"] = {part.name: positions}
    return clients_of(dataset, holdings, seed)


def domain_split(
    dataset: DataSet, seed: int, clients: int, domains_per_client: int = 1, held_out: float = 0.1
) -> tuple[ClientData, ...]:
    """Give every client parts of the same number of domains (Algorithm 5 of hFedF).

    With N clients, d domains per client and Z domains, the ``N d mod Z`` largest domains are split at random into
    ``floor(N d / Z) + 1`` equal parts, and the others into one part less. The parts are assigned to the clients in turn, domain by
    domain, after domains and clients have been shuffled.

    Args:
        dataset: The data to split.
        seed: Seed of all draws.
        clients: Number of clients.
        domains_per_client: Number of domains per client: 1 is the strongest shift, all domains the weakest.
        held_out: Fraction of each client's examples used for validation, if the domains have no validation split.
    """
    check_min("domain_split", "clients", clients, 1)
    check_min("domain_split", "domains_per_client", domains_per_client, 1)
    check_share("domain_split", "held_out", held_out)
    number = len(dataset.domains)
    if not domains_per_client <= number <= clients * domains_per_client:
        raise DataError(
            f"domain_split: {clients} clients with {domains_per_client} domains each do not cover the {number} domains of "
            f"{dataset.name}. Use 1 to {number} domains per client, and clients x domains_per_client of at least {number}."
        )
    random = numpy_generator(seed, "domain_split")
    pieces, extra = divmod(clients * domains_per_client, number)
    largest = [part.name for part in sorted(dataset.domains, key=lambda part: -len(part.train))[:extra]]
    names = numbered("client", clients)
    order = [names[position] for position in random.permutation(clients)]
    holdings: dict[str, dict[str, Positions]] = {name: {} for name in names}
    turn = 0
    for position in random.permutation(number):
        part = dataset.domains[position]
        for piece in cut(random.permutation(len(part.train)), pieces + (part.name in largest)):
            holdings[order[turn % clients]][part.name] = piece
            turn += 1
    split = clients_of(dataset, holdings, seed)
    if held_out == 0 or any(part.validation is not None for part in dataset.domains):
        return split
    return tuple(_hold_out(client, held_out, seed, _groups(dataset, holdings[client.id])) for client in split)


for _partition in (domain, domain_even, domain_parts, iid, dirichlet, shards, natural, domain_split):
    partitions.add(_partition)


def _from_union(dataset: DataSet, pieces: Sequence[Positions], seed: int) -> tuple[ClientData, ...]:
    names = numbered("client", len(pieces))
    return clients_of(dataset, {name: by_domain(dataset, piece) for name, piece in zip(names, pieces, strict=True)}, seed)


def _groups(dataset: DataSet, holding: Mapping[str, Positions]) -> NDArray[np.int64] | None:
    """Return domain and group (n, 2) of a client's training examples, or None if there are no groups."""
    held = [part for part in dataset.domains if part.name in holding]
    if all(part.groups is None for part in held):
        return None
    found: list[tuple[int, int]] = []
    for place, part in enumerate(held):
        for position in np.sort(holding[part.name]).tolist():
            found.append((place, position if part.groups is None else int(part.groups[position])))
    return np.array(found, np.int64).reshape(-1, 2)


def _hold_out(client: ClientData, share: float, seed: int, rows: NDArray[np.int64] | None) -> ClientData:
    """Move a random fraction of the training examples to validation, without splitting groups or removing a whole domain."""
    if rows is not None:
        numbers = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        rest_rows, moved_rows = grouped(client.train.labels.numpy(), numbers, share, seed)
        emptied = ~np.isin(rows[moved_rows, 0], rows[rest_rows, 0])
        rest = torch.from_numpy(np.sort(np.concatenate([rest_rows, moved_rows[emptied]])))
        moved = torch.from_numpy(moved_rows[~emptied])
        return replace(client, train=client.train.subset(rest), validation=client.train.subset(moved)) if len(moved) else client
    total = len(client.train)
    count = min(max(1, round(share * total)), total - 1)
    if count == 0:
        return client
    shuffled = torch.from_numpy(numpy_generator(seed, "held_out", client.id).permutation(total))
    moved, rest = shuffled[:count].sort().values, shuffled[count:].sort().values
    return replace(client, train=client.train.subset(rest), validation=client.train.subset(moved))
