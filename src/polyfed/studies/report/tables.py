"""Tables from summaries of runs: plain rows, which the command line and reports put into their own shape.

A *summary* is what ``Result.summary()`` returns; accuracies and other measures are fractions between 0 and 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.method import Method, parse
from polyfed.core.metrics import SMALLER_IS_BETTER, over_examples, standard_error
from polyfed.core.tasks.known import CLASSIFICATION, pooled, task_of_record
from polyfed.runs.result import Result, measured
from polyfed.studies.compare.candidates import own_words
from polyfed.studies.report.costs import REFERENCE, Expense, Spent, cost_json, expense_of, spent, totals

Summary = Mapping[str, Any]
CLIENT_ROUNDS, TOTALS, ANSWERS = "client_rounds", "totals", "answers"


@dataclass(frozen=True)
class DomainRow:
    """The score on one domain; over several clients' models, their mean by the sizes of their tests."""

    view: str
    domain: str
    value: float
    error: float
    count: int
    clients: int
    accuracy: float
    majority: float


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
    """One method of a comparison; ``problem`` is set where it could not be run.

    ``seen``, ``unseen``, ``mean`` and ``worst`` are of ``measure``; ``tables`` has them of every measure, ``records`` every measure of every
    seed and domain, and ``answers`` the answer for each test image by seed, where they are on this machine. ``own`` are the settings
    that this method has for itself; ``method`` says them too.
    """

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
    measure: str = "accuracy"
    own: Mapping[str, Any] = field(default_factory=dict)
    records: tuple[Mapping[str, Any], ...] = field(default=(), repr=False, compare=False)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    answers: Mapping[int, Mapping[tuple[str, str, str], Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The method's text alone."""
        return self.method.removesuffix(f" with {own_words(self.own)}") if self.own else self.method

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
    return {**result.summary(), CLIENT_ROUNDS: cost.client_rounds, TOTALS: [cost], ANSWERS: result.answers}


def domain_rows(summary: Summary, measure: str = "accuracy") -> list[DomainRow]:
    """A measure, its error and the test size of each domain, seen ones first."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for score in summary["scores"]:
        grouped.setdefault((score["view"], score["domain"]), []).append(score)
    sizes = summary["test_sizes"]
    return [
        _domain_row(view, domain, many, sizes.get(view, {}).get(domain), measure)
        for (view, domain), many in sorted(grouped.items(), key=lambda item: item[0][0] == "unseen")
    ]


def _domain_row(view: str, domain: str, scores: Sequence[Mapping[str, Any]], size: int | None, measure: str) -> DomainRow:
    """The row of a domain with ``size`` test examples; where that is not known, those of the clients are different ones."""
    counts = [score["count"] for score in scores]
    if measure == "accuracy" and "standard_error" in scores[0]:
        error = over_examples(scores, "standard_error")
        if len(scores) > 1 and size in (None, sum(counts)):
            error = math.hypot(*(score["standard_error"] * score["count"] for score in scores)) / sum(counts)
    else:
        error = standard_error(pooled(scores), measure)
    return DomainRow(
        view,
        domain,
        measured(scores, measure),
        error,
        sum(counts) if size is None else size,
        len(scores),
        measured(scores, "accuracy"),
        measured(scores, "majority_rate"),
    )


def cost_rows(summary: Summary) -> list[CostRow]:
    """Bytes by purpose and class of entry, training first."""
    up, down = summary["bytes"]["up"], summary["bytes"]["down"]
    rows = []
    for purpose in sorted({*up, *down}, key=lambda name: (name != "training", name)):
        kinds = dict.fromkeys([*down.get(purpose, {}), *up.get(purpose, {})])
        rows += [CostRow(purpose, kind, up.get(purpose, {}).get(kind, 0), down.get(purpose, {}).get(kind, 0)) for kind in kinds]
    return rows


def measures_of(outcomes: Sequence[Summary]) -> tuple[str, ...]:
    """The measures of the task whose scores these are."""
    first: Mapping[str, Any] = next((score for one in outcomes for score in one["scores"]), {})
    return task_of_record(first).measures


def method_row(
    method: str, outcomes: Sequence[Summary], measure: str = "accuracy", own: Mapping[str, Any] | None = None
) -> MethodRow:
    """One method over its seeds; ``own`` are the settings of its own that its text says."""
    shown = measures_of(outcomes)
    tables = {name: score_table([domain_rows(one, name) for one in outcomes], name in SMALLER_IS_BETTER) for name in shown}
    turns = sum(one[CLIENT_ROUNDS] for one in outcomes)
    return MethodRow(
        method=method,
        **tables[measure],
        bytes_up=sum(one["bytes_up"] for one in outcomes) / turns,
        bytes_down=sum(one["bytes_down"] for one in outcomes) / turns,
        seconds=statistics.fmean(one["seconds"] for one in outcomes),
        spent=spent([run for one in outcomes for run in one[TOTALS]]),
        runs=tuple(run for one in outcomes for run in folders_of(one)),
        measure=measure,
        own=dict(own or {}),
        records=tuple(record for one in outcomes for record in records_of(one)),
        tables=tables,
        answers={one["seed"]: one[ANSWERS] for one in outcomes if ANSWERS in one},
    )


def score_table(per_seed: Sequence[Sequence[DomainRow]], smaller_is_better: bool = False) -> dict[str, Any]:
    """One measure of a method over its seeds: by domain in both views, its mean and its worst."""
    views = {view: _by_domain(per_seed, view) for view in ("seen", "unseen")}
    counted = [row for row in per_seed[0] if row.view == ("seen" if views["seen"] else "unseen")]
    worst_of = max if smaller_is_better else min
    worst = worst_of(counted, key=lambda row: row.value)
    of_mean = math.sqrt(sum(row.error**2 for row in counted)) / len(counted)
    means = _number([statistics.fmean(_values(rows)) for rows in per_seed], of_mean)
    return {**views, "mean": means, "worst": _number([worst_of(_values(rows)) for rows in per_seed], worst.error)}


def chance_of(numbers: Mapping[str, Any]) -> float:
    """The balanced accuracy of any constant answer: one over the number of classes that occur."""
    occurring = sum(count > 0 for count in numbers.get("class_counts", ()))
    return 1 / occurring if occurring else math.nan


def records_of(summary: Summary) -> list[dict[str, Any]]:
    """Every measure of every domain of one run, one flat mapping each."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for score in summary["scores"]:
        grouped.setdefault((score["view"], score["domain"]), []).append(score)
    return [
        {
            "seed": summary.get("seed", 0),
            "view": view,
            "domain": domain,
            **{name: measured(many, name) for name in (*measures_of([summary]), "majority_rate")},
            "chance": chance_of(pooled(many)),
            "test_images": sum(score["count"] for score in many),
        }
        for (view, domain), many in grouped.items()
    ]


def _values(rows: Sequence[DomainRow]) -> list[float]:
    """The scores that a mean is over: those on seen domains, or, where there are none, on unseen ones."""
    return [row.value for row in rows if row.view == "seen"] or [row.value for row in rows]


def folders_of(summary: Summary) -> list[str]:
    """The run folders of a summary; none where nothing was written."""
    written = summary["run"] if isinstance(summary["run"], list) else [summary["run"]]
    return [run for run in written if run is not None]


def table_json(table: Mapping[str, Any]) -> dict[str, Any]:
    """A ``score_table`` as JSON."""
    return {
        "seen": {domain: number_json(number) for domain, number in table.get("seen", {}).items()},
        "unseen": {domain: number_json(number) for domain, number in table.get("unseen", {}).items()},
        "mean": number_json(table.get("mean")),
        "worst": number_json(table.get("worst")),
    }


def row_json(row: MethodRow, cost: Expense | None = None) -> dict[str, Any]:
    """A row as JSON; ``cost`` sets it beside the reference."""
    return {
        "method": row.method,
        "own_settings": dict(row.own),
        "headline": table_json(row.tables.get(row.measure, {})),
        **{name: table_json(row.tables.get(name, {})) for name in row.tables or CLASSIFICATION.measures},
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
    found = {row.domain: [r.value for rows in per_seed for r in rows if (r.view, r.domain) == (view, row.domain)] for row in first}
    return {row.domain: _number(found[row.domain], row.error) for row in first}


def _number(values: Sequence[float], error_of_one: float) -> Number:
    if any(map(math.isnan, values)):
        return Number(math.nan, math.nan, tuple(values))
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
        ANSWERS: {key: found for one in summaries for key, found in one.get(ANSWERS, {}).items() if key[0] == "unseen"},
        "seed": summaries[0].get("seed", 0),
        "run": [one["run"] for one in summaries],
    }


def cost_table(rows: Sequence[MethodRow], given: Mapping[str, Method] | None = None) -> list[Expense]:
    """Cost and privacy of each method that was run, beside the reference where it is among them.

    Args:
        rows: of the comparison.
        given: methods by the texts of their rows; others are known by their texts alone.
    """
    found = []
    for row in rows:
        if not row.problem:
            facts = ((given or {}).get(row.method) or parse(row.text)).facts
            found.append(expense_of(row.method, facts.data_derived_uploads, facts.granularity, row.spent, reference_of(rows)))
    return found


def reference_of(rows: Iterable[MethodRow]) -> Spent | None:
    """What the reference costs; None where it is not among the methods, or could not be run."""
    return next((row.spent for row in rows if row.text == REFERENCE and not row.problem), None)


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
    return f"{100 * value:.1f}" + ("" if error is None or math.isnan(error) else f" ±{100 * error:.1f}")


def baseline_of(rows: Iterable[MethodRow], measure: str) -> dict[str, float]:
    """By column of the table, what always answering the most frequent class scores: its share for accuracy, chance for balanced accuracy."""
    found: dict[str, float] = {}
    for row in rows:
        for record in row.records:
            column = record["domain"] if record["view"] == "seen" or not row.seen else f"unseen: {record['domain']}"
            value = (
                record["majority_rate"]
                if measure == "accuracy"
                else record["chance"]
                if measure == "balanced_accuracy"
                else math.nan
            )
            if not math.isnan(value):
                found.setdefault(column, value)
        counted = [found[domain] for domain in (row.seen or row.unseen) if domain in found]
        if counted:
            found.setdefault("mean", statistics.fmean(counted))
            found.setdefault("worst", min(counted))
    return found


def rounds_words(count: int) -> str:
    """A number of rounds.

    >>> rounds_words(1), rounds_words(20)
    ('1 round', '20 rounds')
    """
    return f"{count} round{'s' * (count != 1)}"
