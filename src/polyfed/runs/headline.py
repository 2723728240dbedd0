"""Which measure heads the tables of a run, and whether a model does better than always answering the most frequent class.

The rule of ``--metric auto``: balanced accuracy where the classes of a test set are uneven, else accuracy. They are uneven where the most
frequent class has more than three times as many images as the other classes have on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.evaluation import Row
from polyfed.core.metrics import MEASURES, pooled
from polyfed.settings import AUTO

UNEVEN = 3.0
NAMED = 3
"""The most test sets that a warning names."""
BASELINE = "most frequent class"
"""What a method is measured against: somebody who always answers it."""


@dataclass(frozen=True)
class Headline:
    """The measure that heads the tables, and why it is this one."""

    measure: str
    reason: str

    @property
    def words(self) -> str:
        """The measure in words."""
        return MEASURES[self.measure]


Domains = Mapping[tuple[str, str], Mapping[str, Any]]
"""The pooled scores of each (view, domain)."""


def domains_of(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Any]]:
    """The scores of each domain, over all clients that were tested on it."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row.view, row.domain), []).append(row.numbers)
    return {key: pooled(many) for key, many in found.items()}


def unevenness(class_counts: Sequence[float]) -> float:
    """How many times the images of the other classes, on average, the most frequent class has; 1 where there is but one class.

    >>> unevenness([24, 3, 3]), unevenness([10, 10])
    (8.0, 1.0)
    """
    occurring = [count for count in class_counts if count]
    if len(occurring) < 2:
        return 1.0
    others = (sum(occurring) - max(occurring)) / (len(occurring) - 1)
    return max(occurring) / others


def headline(metric: str, domains: Domains) -> Headline:
    """The measure that was asked for, or the one that the rule chooses."""
    if metric != AUTO:
        return Headline(metric, f"--metric {metric} was asked for.")
    uneven = {
        domain: ratio
        for (_, domain), numbers in domains.items()
        if (ratio := unevenness(numbers.get("class_counts", ()))) > UNEVEN and "balanced_accuracy" in numbers
    }
    if not uneven:
        return Headline("accuracy", "No test set has a class with more than three times the images of the others.")
    worst = max(uneven, key=lambda domain: uneven[domain])
    more = f" ({len(uneven)} test sets are uneven)" if len(uneven) > 1 else ""
    return Headline(
        "balanced_accuracy",
        f"Balanced accuracy heads the tables: in {worst} the most frequent class has {uneven[worst]:.1f} times the images that the "
        f"other classes have on average{more}. --metric accuracy shows accuracy instead.",
    )


def no_better(numbers: Mapping[str, Any]) -> bool:
    """Whether a model does no better than always answering the most frequent class.

    Its accuracy is not above the share of that class, and its balanced accuracy is within two standard errors of chance. A test set of
    one class cannot say; neither can scores of before counts were kept.
    """
    counts = [count for count in numbers.get("class_counts", ()) if count]
    if len(counts) < 2 or numbers["accuracy"] > numbers["majority_rate"] + 1e-9:
        return False
    chance = 1 / len(counts)
    error = math.sqrt(sum(chance * (1 - chance) / count for count in counts)) / len(counts)
    return bool(numbers["balanced_accuracy"] <= chance + 2 * error)


def warnings(domains: Domains, who: str = "The model") -> list[str]:
    """A plain sentence where a model does no better than always answering the most frequent class."""
    found = {key: numbers for key, numbers in domains.items() if no_better(numbers)}
    if not found:
        return []
    shown = [
        f"{view} {domain}: accuracy {_percent(numbers['accuracy'])}, that class {_percent(numbers['majority_rate'])}, "
        f"balanced accuracy {_percent(numbers['balanced_accuracy'])} (chance {_percent(1 / _classes(numbers))})"
        for (view, domain), numbers in found.items()
    ]
    more = f"; and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return [
        f"{who} is no better than always answering the most frequent class on {len(found)} of {len(domains)} test sets "
        f"({'; '.join(shown[:NAMED])}{more})."
    ]


def warnings_over_seeds(by_seed: Mapping[int, Domains], who: str) -> list[str]:
    """The same for a method with several seeds: one sentence, about the first seed that it is true of."""
    flagged = {seed: text for seed, domains in by_seed.items() for text in warnings(domains, who)}
    if not flagged:
        return []
    seed, text = next(iter(flagged.items()))
    return [text if len(by_seed) == 1 else f"{text} This is seed {seed}; {len(flagged)} of {len(by_seed)} seeds are like it."]


def _classes(numbers: Mapping[str, Any]) -> int:
    return sum(count > 0 for count in numbers["class_counts"])


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
