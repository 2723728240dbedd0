"""Scores in ``metrics.jsonl``, the rounds that count, the primary metric, and warnings about models no better than a constant prediction.

The primary metric is shown first in tables, and rounds and settings are selected by it. It is chosen before round 1 and recorded in
``run.toml``, so that all tables and reports of a run use the same one. The task defines ``--metric auto``. For classification, it is
balanced accuracy if the training labels of a domain are uneven, otherwise accuracy. They are uneven if the most frequent class has more
than three times the mean number of images of the other classes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.data_types import Federation
from polyfed.core.evaluation import Row, mean_numbers
from polyfed.errors import DataError
from polyfed.settings import AUTO, BY_VALIDATION, Settings
from polyfed.tasks.known import pooled, task_of_record, task_of_records
from polyfed.tasks.metrics import MEASURES
from polyfed.tasks.task import Headline

ByRound = Mapping[int, Sequence[Row]]
Domains = Mapping[tuple[str, str], Mapping[str, Any]]
"""Pooled scores of each (view, domain)."""
WINDOW = 10
"""Number of scored rounds, including the last one, that the last round is compared with."""
MIN_BEFORE = 3
"""Minimum number of earlier scored rounds for a comparison."""
DEVIATIONS = 2
VIEWS = ("seen", "unseen")
NOT_NUMBERS = ("round", "view", "client", "domain", "selected_round")
COUNTED = ("confusion", "count", "pixels")
LAST = "last"
BEST_VALIDATION, BEST_LOCAL_VALIDATION = BY_VALIDATION
MAX_NAMED = 3
"""Maximum number of test sets that a warning names."""
BASELINE = "most frequent class"
"""Baseline that methods are compared with: a constant prediction."""
RECORDED = "metric"
"""Table of ``run.toml`` with the primary metric."""


@dataclass(frozen=True)
class LastRounds:
    """The primary metric (mean over domains) after each of the last scored rounds."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float:
        """The sample standard deviation over these rounds."""
        return statistics.stdev(self.values.values())

    @property
    def last(self) -> float:
        return self.values[max(self.values)]

    @property
    def warning(self) -> str:
        """A warning if the last round is more than two deviations from the mean of the earlier rounds, otherwise empty.

        >>> LastRounds({50: 0.864, 60: 0.883, 70: 0.882, 80: 0.882, 90: 0.886, 100: 0.8405}).warning
        'Round 100 scores 84.0 %, but rounds 50 to 90 score 87.9 ± 0.9 %: the last round is not typical. Use --selection "mean_last(10)".'
        """
        *before, end = sorted(self.values)
        earlier = [self.values[number] for number in before]
        if len(earlier) < MIN_BEFORE or not all(map(math.isfinite, self.values.values())):
            return ""
        mean, deviation = statistics.fmean(earlier), statistics.stdev(earlier)
        if abs(self.last - mean) <= DEVIATIONS * deviation:
            return ""
        return (
            f"Round {end} scores {100 * self.last:.1f} %, but rounds {before[0]} to {before[-1]} score {100 * mean:.1f} ± "
            f'{100 * deviation:.1f} %: the last round is not typical. Use --selection "mean_last({WINDOW})".'
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "rounds": sorted(self.values),
            "values": [self.values[number] for number in sorted(self.values)],
            "mean": self.mean,
            "deviation": self.deviation,
            "last": self.last,
        }


def scored_rounds(metrics: Iterable[Mapping[str, Any]], split: str = "test") -> dict[int, list[Row]]:
    """Return the scores of every scored round from metrics lines."""
    views = VIEWS if split == "test" else (split,)
    found: dict[int, list[Row]] = {}
    for line in metrics:
        if line["view"] in views and "count" in line:
            found.setdefault(int(line["round"]), []).append(_row(line))
    return found


def mean_rows(by_round: ByRound) -> list[Row]:
    """Average the scores of each client and domain over rounds; confusion matrices, which contain counts, are those of the last round."""
    numbers: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for rows in by_round.values():
        for row in rows:
            numbers.setdefault((row.view, row.client, row.domain), []).append(row.numbers)
    made = []
    for row in by_round[max(by_round)]:
        counted = {key: row.numbers[key] for key in COUNTED if key in row.numbers}
        made.append(Row(row.view, row.client, row.domain, mean_numbers(numbers[row.view, row.client, row.domain]) | counted))
    return made


def as_line(number: int, row: Row) -> dict[str, Any]:
    return {"round": number, "view": row.view, "client": row.client, "domain": row.domain, **row.numbers}


def rows_at(metrics: Iterable[Mapping[str, Any]], number: int, split: str = "test") -> list[Row]:
    """Return the scores of one round from metrics lines, or of the selected round if the run selected one at that point."""
    views = VIEWS if split == "test" else (split,)
    lines = [dict(line) for line in metrics if line["round"] == number]
    selected = [{**line, "view": line["view"].removeprefix("selected_")} for line in lines if line["view"].startswith("selected_")]
    return [_row(line) for line in selected or [line for line in lines if line["view"] in views]]


def _row(line: Mapping[str, Any]) -> Row:
    return Row(line["view"], line["client"], line["domain"], {key: line[key] for key in line if key not in NOT_NUMBERS})


def require_validation(federation: Federation, settings: Settings) -> None:
    """Raise an error before training if the settings need validation data and a client has none."""
    if settings.needs_validation:
        need, instead = f"--selection {settings.selection} needs validation data", f"Use --selection {LAST}"
    elif settings.patience:
        need, instead = f"--early-stopping {settings.early_stopping} needs validation data", "Remove the option"
    else:
        return
    if lacking := federation.without_validation():
        raise DataError(
            f"{need}, and {lacking}. {instead}, or use data with a validation part (some data sets have an option for it, such as "
            "validation=0.1)."
        )


def domains_of(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, Any]]:
    """Pool the scores of each view and domain over clients."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row.view, row.domain), []).append(row.numbers)
    return {key: pooled(many) for key, many in found.items()}


def headline(metric: str, federation: Federation) -> Headline:
    """Return the requested metric, or choose one from the training labels of each domain, however they are partitioned."""
    if metric != AUTO:
        return requested(metric)
    task, classes = federation.task, len(federation.classes)
    by_domain: dict[str, list[int]] = {}
    for client in federation.clients:
        counts, domain = task.class_counts(client.train, classes), "+".join(client.domains)
        by_domain[domain] = [a + b for a, b in zip(by_domain.get(domain, [0] * len(counts)), counts, strict=True)]
    return task.headline(by_domain)


def requested(metric: str) -> Headline:
    return Headline(metric, f"--metric {metric} was specified.")


def headline_table(found: Headline | None) -> dict[str, dict[str, str]]:
    """Return the table of ``run.toml`` that records the primary metric, if any."""
    return {} if found is None else {RECORDED: {"name": found.measure, "reason": found.reason}}


def recorded_headline(document: Mapping[str, Any]) -> Headline | None:
    """Return the primary metric that ``run.toml`` records; None for older versions, which did not record it."""
    found = document.get(RECORDED)
    if not isinstance(found, Mapping) or found.get("name") not in MEASURES:
        return None
    return Headline(str(found["name"]), str(found.get("reason", "")))


def headline_of(metric: str, documents: Iterable[Mapping[str, Any]], domains: Domains) -> Headline:
    """Return the primary metric of a table of several runs.

    An explicit metric takes precedence over the recorded ones. If those differ, the one that is not the main metric of the task is used.
    If no run records any, the test scores decide, as they did when these runs were trained.

    Args:
        metric: Requested metric, or auto.
        documents: ``run.toml`` of each run.
        domains: Pooled test scores.
    """
    if metric != AUTO:
        return requested(metric)
    found = [one for one in map(recorded_headline, documents) if one is not None]
    main = task_of_records(domains).main_measure
    return next((one for one in found if one.measure != main), found[0] if found else headline_by_scores(AUTO, domains))


def headline_by_scores(metric: str, domains: Domains) -> Headline:
    """Return the requested metric, or choose one from the test labels, for runs that record no primary metric."""
    if metric != AUTO:
        return requested(metric)
    counts = {domain: n.get("class_counts", ()) for (_, domain), n in domains.items() if "balanced_accuracy" in n}
    return task_of_records(domains).headline(counts, "test")


def warnings(domains: Domains, who: str = "The model") -> list[str]:
    """Return a warning if a model is no better than a constant prediction on a test set."""
    found = {key: numbers for key, numbers in domains.items() if task_of_record(numbers).no_better(numbers)}
    if not found:
        return []
    task = task_of_records(found)
    shown = [f"{view} {domain}: {task.compared_with_baseline(numbers)}" for (view, domain), numbers in found.items()]
    more = f"; and {len(shown) - MAX_NAMED} more" if len(shown) > MAX_NAMED else ""
    return [
        f"{who} is no better than {task.baseline} on {len(found)} of {len(domains)} test sets ({'; '.join(shown[:MAX_NAMED])}{more})."
    ]


def warnings_over_seeds(by_seed: Mapping[int, Domains], who: str) -> list[str]:
    """Return one warning for a method with several seeds, about the first affected seed."""
    flagged = {seed: text for seed, domains in by_seed.items() for text in warnings(domains, who)}
    if not flagged:
        return []
    seed, text = next(iter(flagged.items()))
    return [text if len(by_seed) == 1 else f"{text} This is seed {seed}; {len(flagged)} of {len(by_seed)} seeds are affected."]
