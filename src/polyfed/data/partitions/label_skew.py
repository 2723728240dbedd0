"""Label skew: how many examples of each class every client gets, then which ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyfed.data.store.splits import Positions
from polyfed.errors import DataError

Counts = NDArray[np.int64]

MAX_DRAWS = 10_000


def per_class_counts(totals: Counts, clients: int, alpha: float, minimum: int, random: np.random.Generator) -> Counts:
    """Draw, for each class, its proportions over the clients from Dir(alpha).

    A client that already holds ``n / clients`` examples gets nothing of the next class. Everything is drawn again
    until the smallest client holds ``minimum`` examples.

    Args:
        totals: Examples of each class, shape (classes,).
        clients: Number of clients.
        alpha: Concentration; small values give few classes per client.
        minimum: Least number of examples of any client.
        random: Where the draws come from.

    Returns:
        Examples of each class at each client, shape (clients, classes).
    """
    full = totals.sum() / clients
    for _ in range(MAX_DRAWS):
        counts = np.zeros((clients, len(totals)), np.int64)
        for label, total in enumerate(totals):
            is_open = counts.sum(axis=1) < full
            shares = random.dirichlet(np.full(clients, alpha)) * is_open
            # With a small alpha all shares of the open clients can underflow to 0.
            shares = shares / shares.sum() if shares.sum() > 0 else is_open / is_open.sum()
            bounds = (np.cumsum(shares)[:-1] * total).astype(np.int64)
            counts[:, label] = np.diff(bounds, prepend=0, append=total)
        if counts.sum(axis=1).min() >= minimum:
            return counts
    raise DataError(
        f"dirichlet: in {MAX_DRAWS} draws no split of {totals.sum()} examples among {clients} clients with alpha={alpha} "
        f"gave every client {minimum} examples. Use fewer clients, a larger alpha or a smaller minimum."
    )


def per_client_counts(totals: Counts, clients: int, alpha: float, random: np.random.Generator) -> Counts:
    """Draw each client's class distribution from Dir(alpha) and fill the client from it without replacement.

    All clients get the same number of examples, up to one. A class that is used up is left out from then on.

    Args:
        totals: Examples of each class, shape (classes,).
        clients: Number of clients.
        alpha: Concentration; small values give few classes per client.
        random: Where the draws come from.

    Returns:
        Examples of each class at each client, shape (clients, classes).
    """
    left = totals.copy()
    counts = np.zeros((clients, len(totals)), np.int64)
    bounds = totals.sum() * np.arange(clients + 1) // clients
    for client, size in enumerate(np.diff(bounds)):
        wish = random.dirichlet(np.full(len(totals), alpha))
        while (missing := size - counts[client].sum()) > 0:
            shares = wish * (left > 0)
            # What is left may be classes this client gives no share at all: then it takes them as they come.
            shares = shares / shares.sum() if shares.sum() > 0 else left / left.sum()
            taken = np.minimum(random.multinomial(missing, shares), left)
            counts[client] += taken
            left -= taken
    return counts


def shard_counts(totals: Counts, clients: int, classes_per_client: int, random: np.random.Generator) -> Counts:
    """Cut each class into shards of equal size and give every client shards of different classes.

    All classes get the same number of shards; if that does not work out, the largest get one more.

    Args:
        totals: Examples of each class that occurs, shape (classes,).
        clients: Number of clients.
        classes_per_client: Number of shards, each of another class, that a client gets.
        random: Decides who gets which classes.

    Returns:
        Examples of each class at each client, shape (clients, classes).
    """
    shards, extra = divmod(clients * classes_per_client, len(totals))
    number = np.full(len(totals), shards)
    number[np.argsort(-totals, kind="stable")[:extra]] += 1
    left = number.copy()
    counts = np.zeros((clients, len(totals)), np.int64)
    for client in random.permutation(clients):
        # Taking the classes with the most shards left always succeeds; equal ones are chosen at random.
        chosen = np.lexsort((random.random(len(totals)), -left))[:classes_per_client]
        for label in chosen:
            piece = number[label] - left[label]
            counts[client, label] = totals[label] * (piece + 1) // number[label] - totals[label] * piece // number[label]
        left[chosen] -= 1
    return counts


def positions_of(labels: NDArray[np.int64], counts: Counts, present: Counts, random: np.random.Generator) -> list[Positions]:
    """Random positions for each client, with exactly these counts of each class.

    Args:
        labels: All labels, shape (n,).
        counts: Examples of each class at each client, shape (clients, classes).
        present: The label that each column of ``counts`` stands for, shape (classes,).
        random: Decides which examples of a class a client gets.
    """
    parts: list[list[Positions]] = [[] for _ in counts]
    for column, label in enumerate(present):
        shuffled = random.permutation(np.flatnonzero(labels == label))
        for part, piece in zip(parts, np.split(shuffled, np.cumsum(counts[:-1, column])), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]
