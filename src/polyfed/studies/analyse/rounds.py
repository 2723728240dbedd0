"""What a run wrote down round by round: the drift of batch-norm statistics (FixBN Figure 2), and what a method noted (hFedF 4, 6, 7)."""

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
    """How batch-norm statistics moved, by round.

    Attributes:
        change: of the server's statistics in a round (L1).
        distance: of each client's statistics from the server's before the round (L1), by client.
        variance: of each client's own statistics over the last rounds, by client; some values are watched, and this is their mean.
        window: rounds that the variance is taken over.
    """

    change: ByRound
    distance: Mapping[str, ByRound]
    variance: Mapping[str, ByRound]
    window: int


def statistics_drift(lines: Lines, window: int = 200) -> Drift:
    """How batch-norm statistics moved in a run.

    Args:
        lines: of its ``metrics.jsonl``.
        window: rounds that the variance of a client's statistics is taken over.
    """
    mine = [line for line in lines if line["view"] == STATISTICS]
    if not mine:
        raise RunFolderError(
            "The run wrote no batch-norm statistics down: its model has none, it was made by an older polyfed, or it had no folder."
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
    """What a method noted by round and client.

    Attributes:
        numbers: by name, client and round.
        vectors: by name, client and round.
    """

    numbers: Mapping[str, Mapping[str, ByRound]]
    vectors: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]

    def largest_deviation(self, name: str) -> tuple[str, float]:
        """The client whose number strays farthest from the others' mean in some round, and by how much."""
        by_client = self.numbers[name]
        strayed = {
            client: max(abs(value - self.mean(name, number)) for number, value in one.items()) for client, one in by_client.items()
        }
        client = max(strayed, key=lambda who: strayed[who])
        return client, strayed[client]

    def last_deviation(self, name: str) -> float:
        """How far a client's number strays from the others' mean in the last round, at most."""
        return max(abs(value - self.mean(name, number)) for number, value in self.last(name).values())

    def last(self, name: str) -> dict[str, tuple[int, float]]:
        """Each client's last round and number."""
        return {client: (max(one), one[max(one)]) for client, one in self.numbers[name].items()}

    def apart(self) -> float:
        """The largest distance between two clients' last vectors; not a number where none were noted."""
        ends = [[by_round[max(by_round)] for by_round in by_client.values()] for by_client in self.vectors.values()]
        return max((math.dist(one, other) for vectors in ends for one, other in combinations(vectors, 2)), default=math.nan)

    def mean(self, name: str, number: int) -> float:
        """The mean over clients in one round."""
        return statistics.fmean(one[number] for one in self.numbers[name].values() if number in one)


def noted(lines: Lines) -> Noted:
    """What the method of a run noted of its rounds: weights of clients, embeddings.

    Args:
        lines: of its ``metrics.jsonl``.
    """
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
            "The method of the run notes nothing by round. Those that learn weights or embeddings of clients do (hfedf)."
        )
    return Noted(numbers, vectors)
