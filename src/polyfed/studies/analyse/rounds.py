"""Read from the metrics how batch-norm statistics drift (FixBN Figure 2) and what a method logs per client (hFedF Figures 4, 6, 7)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from polyfed.errors import RunFolderError
from polyfed.runs.callbacks.training_metrics import ALL, NOTED, STATISTICS

ByRound = Mapping[int, float]
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Drift:
    """Drift of batch-norm statistics by round.

    Attributes:
        change: L1 change of the server statistics in a round.
        distance: L1 distance of each client's statistics from the server statistics before the round, by client.
        variance: Variance of each client's statistics over the last rounds, by client: the mean over a sample of values.
        window: Number of rounds that the variance covers.
    """

    change: ByRound
    distance: Mapping[str, ByRound]
    variance: Mapping[str, ByRound]
    window: int


def statistics_drift(lines: Lines, window: int = 200) -> Drift:
    """Return the drift of batch-norm statistics from the lines of a run's ``metrics.jsonl``."""
    mine = [line for line in lines if line["view"] == STATISTICS]
    if not mine:
        raise RunFolderError(
            "The run stored no batch-norm statistics: its model has none, it was trained by an older polyfed, or it had no folder."
        )
    clients = sorted({line["client"] for line in mine} - {ALL})
    by_client = {client: {line["round"]: line for line in mine if line["client"] == client} for client in clients}
    return Drift(
        {line["round"]: line["change"] for line in mine if line["client"] == ALL},
        {client: {number: line["distance"] for number, line in found.items()} for client, found in by_client.items()},
        {client: _variances({n: line["sample"] for n, line in found.items()}, window) for client, found in by_client.items()},
        window,
    )


def _variances(samples: Mapping[int, Sequence[float]], window: int) -> dict[int, float]:
    rounds = sorted(samples)
    found = {}
    for place, number in enumerate(rounds):
        seen = [samples[other] for other in rounds[: place + 1] if other > number - window]
        if len(seen) > 1:
            found[number] = statistics.fmean(statistics.pvariance(values) for values in zip(*seen, strict=True))
    return found


@dataclass(frozen=True)
class Noted:
    """The numbers and vectors that a method logged, by name, client and round."""

    numbers: Mapping[str, Mapping[str, ByRound]]
    vectors: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]

    def largest_deviation(self, name: str) -> tuple[str, float]:
        """Return the client whose number deviates most from the mean over clients in any round, and that deviation."""
        deviations = {
            client: max(abs(value - self.mean(name, number)) for number, value in by_round.items())
            for client, by_round in self.numbers[name].items()
        }
        client = max(deviations, key=lambda each: deviations[each])
        return client, deviations[client]

    def last_deviation(self, name: str) -> float:
        """Return the largest deviation of a client's last number from the mean over clients in that round."""
        return max(abs(value - self.mean(name, number)) for number, value in self.last(name).values())

    def last(self, name: str) -> dict[str, tuple[int, float]]:
        """Return the last round of each client and its number."""
        return {client: (max(one), one[max(one)]) for client, one in self.numbers[name].items()}

    def max_distance(self) -> float:
        """Return the largest distance between two clients' last vectors, or NaN if there are none."""
        last = [[by_round[max(by_round)] for by_round in by_client.values()] for by_client in self.vectors.values()]
        return max((math.dist(one, other) for vectors in last for one, other in combinations(vectors, 2)), default=math.nan)

    def mean(self, name: str, number: int) -> float:
        return statistics.fmean(one[number] for one in self.numbers[name].values() if number in one)


def noted(lines: Lines) -> Noted:
    """Return the per-client numbers and vectors, such as weights and embeddings, in the lines of a run's ``metrics.jsonl``."""
    numbers: dict[str, dict[str, dict[int, float]]] = {}
    vectors: dict[str, dict[str, dict[int, Sequence[float]]]] = {}
    for line in lines:
        if line["view"] != NOTED:
            continue
        for name, value in line.items():
            if name not in ("round", "view", "client"):
                target: Any = vectors if isinstance(value, list) else numbers
                target.setdefault(name, {}).setdefault(line["client"], {})[line["round"]] = value
    if not numbers and not vectors:
        raise RunFolderError(
            "The method of the run logs no values per client and round. Use one that learns client weights or embeddings (hfedf)."
        )
    return Noted(numbers, vectors)
