"""Which measure heads the tables of a run, and whether a model does better than always giving the same answer.

The task has the rule of ``--metric auto``. That of classification: balanced accuracy where the classes of a test set are uneven, else
accuracy. They are uneven where the most frequent class has more than three times as many images as the other classes have on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from polyfed.core.evaluation import Row
from polyfed.core.tasks.known import pooled, task_of_record, task_of_records
from polyfed.core.tasks.task import Headline
from polyfed.settings import AUTO

NAMED = 3
"""The most test sets that a warning names."""
BASELINE = "most frequent class"
"""What a method is measured against: somebody who always answers it."""


Domains = Mapping[tuple[str, str], Mapping[str, Any]]
"""The pooled scores of each (view, domain)."""


def domains_of(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Any]]:
    """The scores of each domain, over all clients that were tested on it."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row.view, row.domain), []).append(row.numbers)
    return {key: pooled(many) for key, many in found.items()}


def headline(metric: str, domains: Domains) -> Headline:
    """The measure that was asked for, or the one that the rule chooses."""
    if metric != AUTO:
        return Headline(metric, f"--metric {metric} was asked for.")
    return task_of_records(domains).headline(domains)


def no_better(numbers: Mapping[str, Any]) -> bool:
    """Whether a model does no better than somebody who always gives the same answer, as its task says."""
    return task_of_record(numbers).no_better(numbers)


def warnings(domains: Domains, who: str = "The model") -> list[str]:
    """A plain sentence where a model does no better than always giving the same answer."""
    found = {key: numbers for key, numbers in domains.items() if no_better(numbers)}
    if not found:
        return []
    task = task_of_records(found)
    shown = [f"{view} {domain}: {task.compared_with_nobody(numbers)}" for (view, domain), numbers in found.items()]
    more = f"; and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return [
        f"{who} is no better than {task.nobody} on {len(found)} of {len(domains)} test sets ({'; '.join(shown[:NAMED])}{more})."
    ]


def warnings_over_seeds(by_seed: Mapping[int, Domains], who: str) -> list[str]:
    """The same for a method with several seeds: one sentence, about the first seed that it is true of."""
    flagged = {seed: text for seed, domains in by_seed.items() for text in warnings(domains, who)}
    if not flagged:
        return []
    seed, text = next(iter(flagged.items()))
    return [text if len(by_seed) == 1 else f"{text} This is seed {seed}; {len(flagged)} of {len(by_seed)} seeds are like it."]
