"""Tables from summaries of runs: plain rows, which the command line and reports put into their own shape.

A *summary* is what ``Result.summary()`` returns; accuracies are fractions between 0 and 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.method import Method, parse
from polyfed.reports.costs import REFERENCE, Expense, Spent, cost_json, expense_of, spent, totals
from polyfed.runs.result import Result, over_examples

Summary = Mapping[str, Any]
CLIENT_ROUNDS, TOTALS = "client_rounds", "totals"


@dataclass(frozen=True)
class DomainRow:
    """The accuracy on one domain; over several clients' models, their mean by the sizes of their tests."""

    view: str
    domain: str
    accuracy: float
    error: float
    count: int
    clients: int


@dataclass(frozen=True)
class CostRow:
    """Bytes of one class of entry for one purpose."""

    purpose: str
    kind: str
    up: int
    down: int


@dataclass(frozen=True)
class Number:
    """A mean over seeds; ``error`` is the sample standard deviation over them, or, of one seed, the binomial standard error."""

    value: float
    error: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class MethodRow:
    """One method of a comparison; ``problem`` is set where it could not be run."""

    method: str
    seen: Mapping[str, Number] = field(default_factory=dict)
    unseen: Mapping[str, Number] = field(default_factory=dict)
    mean: Number | None = None
    worst: Number | None = None
    bytes_up: float = math.nan
    bytes_down: float = math.nan
    seconds: float = math.nan
    spent: Spent = Spent()
    runs: tuple[str, ...] = ()
    problem: str = ""

    def columns(self) -> dict[str, Number]:
        """All accuracies under one name each, in the order of the table."""
        if not self.seen:
            return dict(self.unseen) | self._over_domains()
        return dict(self.seen) | self._over_domains() | {f"unseen: {domain}": number for domain, number in self.unseen.items()}

    def _over_domains(self) -> dict[str, Number]:
        return {name: number for name, number in (("mean", self.mean), ("worst", self.worst)) if number is not None}


def outcome(result: Result) -> dict[str, Any]:
    """The summary of a run, with how often a client took part, which turns bytes into bytes per client and round, and what it cost."""
    experiment = result.experiment
    clients, rounds = len(experiment.federation.clients), experiment.server.round
    cost = totals(experiment.costs, clients, experiment.settings.sampled(clients), rounds)
    return {**result.summary(), CLIENT_ROUNDS: cost.client_rounds, TOTALS: [cost]}


def domain_rows(summary: Summary) -> list[DomainRow]:
    """Accuracy, error and test size of each domain, seen ones first."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for score in summary["scores"]:
        grouped.setdefault((score["view"], score["domain"]), []).append(score)
    sizes = summary["test_sizes"]
    return [
        _domain_row(view, domain, many, sizes.get(view, {}).get(domain))
        for (view, domain), many in sorted(grouped.items(), key=lambda item: item[0][0] == "unseen")
    ]


def _domain_row(view: str, domain: str, scores: Sequence[Mapping[str, Any]], size: int | None) -> DomainRow:
    """The row of a domain with ``size`` test examples; where that is not known, those of the clients are different ones."""
    counts = [score["count"] for score in scores]
    error = over_examples(scores, "standard_error")
    if len(scores) > 1 and size in (None, sum(counts)):
        error = math.hypot(*(score["standard_error"] * score["count"] for score in scores)) / sum(counts)
    return DomainRow(view, domain, over_examples(scores, "accuracy"), error, sum(counts) if size is None else size, len(scores))


def cost_rows(summary: Summary) -> list[CostRow]:
    """Bytes by purpose and class of entry, training first."""
    up, down = summary["bytes"]["up"], summary["bytes"]["down"]
    rows = []
    for purpose in sorted({*up, *down}, key=lambda name: (name != "training", name)):
        kinds = dict.fromkeys([*down.get(purpose, {}), *up.get(purpose, {})])
        rows += [CostRow(purpose, kind, up.get(purpose, {}).get(kind, 0), down.get(purpose, {}).get(kind, 0)) for kind in kinds]
    return rows


def method_row(method: str, outcomes: Sequence[Summary]) -> MethodRow:
    """One method over its seeds."""
    per_seed = [domain_rows(one) for one in outcomes]
    views = {view: _by_domain(per_seed, view) for view in ("seen", "unseen")}
    counted = [row for row in per_seed[0] if row.view == ("seen" if views["seen"] else "unseen")]
    worst = min(counted, key=lambda row: row.accuracy)
    of_mean = math.sqrt(sum(row.error**2 for row in counted)) / len(counted)
    turns = sum(one[CLIENT_ROUNDS] for one in outcomes)
    return MethodRow(
        method=method,
        seen=views["seen"],
        unseen=views["unseen"],
        mean=_number([one["accuracy"]["mean"] for one in outcomes], of_mean),
        worst=_number([one["accuracy"]["worst"] for one in outcomes], worst.error),
        bytes_up=sum(one["bytes_up"] for one in outcomes) / turns,
        bytes_down=sum(one["bytes_down"] for one in outcomes) / turns,
        seconds=statistics.fmean(one["seconds"] for one in outcomes),
        spent=spent([run for one in outcomes for run in one[TOTALS]]),
        runs=tuple(run for one in outcomes for run in folders_of(one)),
    )


def folders_of(summary: Summary) -> list[str]:
    """The run folders of a summary; none where nothing was written."""
    written = summary["run"] if isinstance(summary["run"], list) else [summary["run"]]
    return [run for run in written if run is not None]


def row_json(row: MethodRow, cost: Expense | None = None) -> dict[str, Any]:
    """A row as JSON; ``cost`` sets it beside the reference."""
    return {
        "method": row.method,
        "accuracy": {
            "seen": {domain: number_json(number) for domain, number in row.seen.items()},
            "unseen": {domain: number_json(number) for domain, number in row.unseen.items()},
            "mean": number_json(row.mean),
            "worst": number_json(row.worst),
        },
        "bytes_up_per_client_and_round": row.bytes_up,
        "bytes_down_per_client_and_round": row.bytes_down,
        "seconds": row.seconds,
        "costs": None if cost is None else cost_json(cost),
        "runs": row.runs,
        "problem": row.problem or None,
    }


def number_json(number: Number | None) -> dict[str, Any] | None:
    """A number over seeds as JSON."""
    return None if number is None else {"mean": number.value, "error": number.error, "values": number.values}


def _by_domain(per_seed: Sequence[Sequence[DomainRow]], view: str) -> dict[str, Number]:
    first = [row for row in per_seed[0] if row.view == view]
    found = {
        row.domain: [r.accuracy for rows in per_seed for r in rows if (r.view, r.domain) == (view, row.domain)] for row in first
    }
    return {row.domain: _number(found[row.domain], row.error) for row in first}


def _number(values: Sequence[float], error_of_one: float) -> Number:
    return Number(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else error_of_one, tuple(values))


def left_out_in_turn(summaries: Sequence[Summary]) -> dict[str, Any]:
    """One summary from runs that each left out one domain: its unseen accuracies, and the sum of the costs."""
    unseen = {domain: value for one in summaries for domain, value in one["accuracy"]["unseen"].items()}
    values = list(unseen.values())
    return {
        "accuracy": {
            "seen": {},
            "unseen": unseen,
            "mean": statistics.fmean(values),
            "worst": min(values),
            "spread": max(values) - min(values),
        },
        "test_sizes": {"seen": {}, "unseen": {d: n for one in summaries for d, n in one["test_sizes"]["unseen"].items()}},
        "scores": [score for one in summaries for score in one["scores"] if score["view"] == "unseen"],
        "bytes_up": sum(one["bytes_up"] for one in summaries),
        "bytes_down": sum(one["bytes_down"] for one in summaries),
        "seconds": sum(one["seconds"] for one in summaries),
        CLIENT_ROUNDS: sum(one[CLIENT_ROUNDS] for one in summaries),
        TOTALS: [run for one in summaries for run in one[TOTALS]],
        "run": [one["run"] for one in summaries],
    }


def cost_table(rows: Sequence[MethodRow], given: Mapping[str, Method | None] | None = None) -> list[Expense]:
    """Cost and privacy of each method that was run, beside the reference where it is among them.

    Args:
        rows: of the comparison.
        given: methods that are values of Python, by their texts; the others are known by their texts alone.
    """
    found = []
    for row in rows:
        if not row.problem:
            facts = ((given or {}).get(row.method) or parse(row.method)).facts
            found.append(expense_of(row.method, facts.data_derived_uploads, facts.granularity, row.spent, reference_of(rows)))
    return found


def reference_of(rows: Iterable[MethodRow]) -> Spent | None:
    """What the reference costs; None where it is not among the methods, or could not be run."""
    return next((row.spent for row in rows if row.method == REFERENCE and not row.problem), None)


def column_names(rows: Iterable[MethodRow]) -> list[str]:
    """The accuracy columns of a comparison."""
    return list(dict.fromkeys(name for row in rows for name in row.columns()))


def best_methods(rows: Sequence[MethodRow]) -> dict[str, set[str]]:
    """The methods that are best in each column; nobody where all are equal."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if not row.problem:
            numbers = {name: number.value for name, number in row.columns().items()}
            costs = {"up": -row.bytes_up, "down": -row.bytes_down, "seconds": -row.seconds}
            for column, value in {**numbers, **costs}.items():
                found.setdefault(column, {})[row.method] = value
    return {column: _best(values) for column, values in found.items()}


def _best(values: Mapping[str, float]) -> set[str]:
    top = max(values.values())
    chosen = {method for method, value in values.items() if value == top}
    return set() if len(chosen) == len(values) else chosen


def percent(value: float, error: float | None = None) -> str:
    """A fraction as a percentage, with its error.

    >>> percent(0.8314, 0.0123)
    '83.1 ±1.2'
    """
    return f"{100 * value:.1f}" + ("" if error is None else f" ±{100 * error:.1f}")


def rounds_words(count: int) -> str:
    """A number of rounds.

    >>> rounds_words(1), rounds_words(20)
    ('1 round', '20 rounds')
    """
    return f"{count} round{'s' * (count != 1)}"
