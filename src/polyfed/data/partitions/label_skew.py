"""Label skew: draw the number of examples per class and client, and then the examples themselves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyfed.data.store.splits import Positions
from polyfed.errors import DataError

Counts = NDArray[np.int64]

MAX_DRAWS = 10_000


def per_class_counts(totals: Counts, clients: int, alpha: float, minimum: int, random: np.random.Generator) -> Counts:
    """Draw the proportions of each class over the clients from Dir(alpha). Return counts of shape (clients, classes).

    A client with ``n / clients`` examples receives nothing of the next class. The whole draw is repeated until every client has at
    least ``minimum`` examples.
    """
    full = totals.sum() / clients
    for _ in range(MAX_DRAWS):
        counts = np.zeros((clients, len(totals)), np.int64)
        for label, total in enumerate(totals):
            is_open = counts.sum(axis=1) < full
            shares = random.dirichlet(np.full(clients, alpha)) * is_open
            # With a small alpha, the shares of all open clients can underflow to 0.
            shares = shares / shares.sum() if shares.sum() > 0 else is_open / is_open.sum()
            bounds = (np.cumsum(shares)[:-1] * total).astype(np.int64)
            counts[:, label] = np.diff(bounds, prepend=0, append=total)
        if counts.sum(axis=1).min() >= minimum:
            return counts
    raise DataError(
        f"dirichlet: none of {MAX_DRAWS} random splits of {totals.sum()} examples across {clients} clients with alpha={alpha} "
        f"gave every client {minimum} examples. Use fewer clients, a larger alpha or a smaller minimum."
    )


def per_client_counts(totals: Counts, clients: int, alpha: float, random: np.random.Generator) -> Counts:
    """Draw the class distribution of each client from Dir(alpha), and sample from it without replacement.

    Client sizes differ by at most one. Exhausted classes are skipped. Returns counts of shape (clients, classes).
    """
    left = totals.copy()
    counts = np.zeros((clients, len(totals)), np.int64)
    bounds = totals.sum() * np.arange(clients + 1) // clients
    for client, size in enumerate(np.diff(bounds)):
        wanted = random.dirichlet(np.full(len(totals), alpha))
        while (missing := size - counts[client].sum()) > 0:
            shares = wanted * (left > 0)
            # If this client has no share in any remaining class, sample from all remaining examples.
            shares = shares / shares.sum() if shares.sum() > 0 else left / left.sum()
            taken = np.minimum(random.multinomial(missing, shares), left)
            counts[client] += taken
            left -= taken
    return counts


def shard_counts(totals: Counts, clients: int, classes_per_client: int, random: np.random.Generator) -> Counts:
    """Cut each class into shards of equal size, and give every client shards of different classes.

    All classes have the same number of shards, except that the largest have one more if the number of shards is not divisible.
    Returns counts of shape (clients, classes).
    """
    shards, extra = divmod(clients * classes_per_client, len(totals))
    number = np.full(len(totals), shards)
    number[np.argsort(-totals, kind="stable")[:extra]] += 1
    left = number.copy()
    counts = np.zeros((clients, len(totals)), np.int64)
    for client in random.permutation(clients):
        # Taking the classes with the most remaining shards always succeeds. Ties are broken at random.
        chosen = np.lexsort((random.random(len(totals)), -left))[:classes_per_client]
        for label in chosen:
            piece = number[label] - left[label]
            counts[client, label] = totals[label] * (piece + 1) // number[label] - totals[label] * piece // number[label]
        left[chosen] -= 1
    return counts


def positions_of(labels: NDArray[np.int64], counts: Counts, present: Counts, random: np.random.Generator) -> list[Positions]:
    """Draw positions for each client with exactly the given counts (clients, classes). ``present`` has the label of each column."""
    parts: list[list[Positions]] = [[] for _ in counts]
    for column, label in enumerate(present):
        shuffled = random.permutation(np.flatnonzero(labels == label))
        for part, piece in zip(parts, np.split(shuffled, np.cumsum(counts[:-1, column])), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]
