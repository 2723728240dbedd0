"""Choose the metric of a run, and find models that do no better than always giving the same answer.

The metric heads the tables, and rounds and settings are chosen by it. It is chosen before round 1 and recorded in ``run.toml``, so all
tables and reports of a run have the same one. The task has the rule of ``--metric auto``. For classification: balanced accuracy if the
training labels of a domain are uneven, else accuracy. They are uneven if the most frequent class has more than three times as many images
as the other classes have on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from polyfed.core.data_types import Federation
from polyfed.core.evaluation import Row
from polyfed.settings import AUTO
from polyfed.tasks.known import pooled, task_of_record, task_of_records
from polyfed.tasks.metrics import MEASURES
from polyfed.tasks.task import Headline

NAMED = 3
"""The most test sets that a warning names."""
BASELINE = "most frequent class"
"""The baseline that a method is compared with: a constant prediction."""


RECORDED = "metric"
"""The table of ``run.toml`` that holds the choice."""
Domains = Mapping[tuple[str, str], Mapping[str, Any]]
"""The pooled scores of each (view, domain)."""


def domains_of(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Any]]:
    """The scores of each domain, over all clients that were tested on it."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row.view, row.domain), []).append(row.numbers)
    return {key: pooled(many) for key, many in found.items()}


def headline(metric: str, federation: Federation) -> Headline:
    """Return the requested metric, or choose one from the training labels of each domain, whichever clients hold them."""
    if metric != AUTO:
        return requested(metric)
    task, classes = federation.task, len(federation.classes)
    by_domain: dict[str, list[int]] = {}
    for client in federation.clients:
        counts, domain = task.class_counts(client.train, classes), "+".join(client.domains)
        by_domain[domain] = [a + b for a, b in zip(by_domain.get(domain, [0] * len(counts)), counts, strict=True)]
    return task.headline(by_domain)


def requested(metric: str) -> Headline:
    return Headline(metric, f"--metric {metric} was asked for.")


def as_plain(found: Headline | None) -> dict[str, dict[str, str]]:
    """Return what ``run.toml`` records of the choice; nothing if there is none."""
    return {} if found is None else {RECORDED: {"name": found.measure, "reason": found.reason}}


def recorded_headline(document: Mapping[str, Any]) -> Headline | None:
    """Return the choice that ``run.toml`` records; None for folders of versions that recorded none."""
    found = document.get(RECORDED)
    if not isinstance(found, Mapping) or found.get("name") not in MEASURES:
        return None
    return Headline(str(found["name"]), str(found.get("reason", "")))


def headline_of(metric: str, documents: Iterable[Mapping[str, Any]], domains: Domains) -> Headline:
    """Return the metric of one table over several runs.

    An explicit metric wins, then what the runs record. If they differ, the one that is not the task's main metric wins. If no run records
    any, the test scores decide, as they did when these runs were trained.

    Args:
        metric: the requested metric, or auto.
        documents: ``run.toml`` of each run.
        domains: pooled test scores.
    """
    if metric != AUTO:
        return requested(metric)
    found = [one for one in map(recorded_headline, documents) if one is not None]
    main = task_of_records(domains).main_measure
    return next((one for one in found if one.measure != main), found[0] if found else headline_by_scores(AUTO, domains))


def headline_by_scores(metric: str, domains: Domains) -> Headline:
    """Return the requested metric, or choose one from the test labels: the rule for runs that record no choice."""
    if metric != AUTO:
        return requested(metric)
    counts = {domain: n.get("class_counts", ()) for (_, domain), n in domains.items() if "balanced_accuracy" in n}
    return task_of_records(domains).headline(counts, "test")


def no_better(numbers: Mapping[str, Any]) -> bool:
    """Return True if a model does no better than a constant prediction, by its task's rule."""
    return task_of_record(numbers).no_better(numbers)


def warnings(domains: Domains, who: str = "The model") -> list[str]:
    """Return a warning if a model does no better than a constant prediction."""
    found = {key: numbers for key, numbers in domains.items() if no_better(numbers)}
    if not found:
        return []
    task = task_of_records(found)
    shown = [f"{view} {domain}: {task.compared_with_baseline(numbers)}" for (view, domain), numbers in found.items()]
    more = f"; and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return [
        f"{who} is no better than {task.baseline} on {len(found)} of {len(domains)} test sets ({'; '.join(shown[:NAMED])}{more})."
    ]


def warnings_over_seeds(by_seed: Mapping[int, Domains], who: str) -> list[str]:
    """The same for a method with several seeds: one sentence, about the first seed that it is true of."""
    flagged = {seed: text for seed, domains in by_seed.items() for text in warnings(domains, who)}
    if not flagged:
        return []
    seed, text = next(iter(flagged.items()))
    return [text if len(by_seed) == 1 else f"{text} This is seed {seed}; {len(flagged)} of {len(by_seed)} seeds are like it."]
