"""Summarise several runs: one row per method, with the means, errors, best values and rankings that all tables print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from polyfed.core.method import parse
from polyfed.errors import PolyfedError
from polyfed.runs.costs import Costs
from polyfed.runs.figures import dots_figure
from polyfed.runs.folder.divergence import Divergence
from polyfed.runs.folder.final_files import Answers
from polyfed.runs.result import over_domains
from polyfed.runs.scores import VIEWS, headline_of
from polyfed.settings import Settings
from polyfed.studies.report.costs import Spent, Totals, spent, totals
from polyfed.studies.report.run_record import MEAN, SPREAD, WORST, RunRecord, average, binomial_error, chance_of, deviation
from polyfed.studies.report.words import format_missing
from polyfed.tasks.known import task_of_records
from polyfed.tasks.metrics import MEASURES, NEITHER_IS_BETTER, SMALLER_IS_BETTER
from polyfed.tasks.task import Headline, Task

EQUAL = 1e-9
MARK = "†"
"""Mark of a method without a result for some seed."""


class Number(NamedTuple):
    """A mean over seeds; ``error`` is the sample standard deviation or, for one seed, the standard error of its test set."""

    value: float
    error: float
    values: tuple[float, ...]


class Cell(NamedTuple):
    """A score of a method in a table, and whether it is printed in bold."""

    number: Number | None
    best: bool


class Column(NamedTuple):
    """A column of a score table: a domain, or the mean, worst or spread over domains."""

    name: str
    view: str
    key: Any


@dataclass(frozen=True, eq=False)
class MethodRow:
    """One method with the same settings over its seeds, for one metric.

    Attributes:
        method: Label of the method, including its settings.
        records: Runs of all seeds.
        measure: Metric.
        own: Per-method settings.
        problem: Reason why the method could not be run.
        missing: Seeds without a finished run, with the reasons. Such a method is marked, never in bold and never ranked first.
        divergence: Where a run diverged, if that is the problem.
    """

    method: str
    records: Sequence[RunRecord] = field(default=(), repr=False)
    measure: str = "accuracy"
    own: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    missing: Mapping[int, str] = field(default_factory=dict)
    divergence: Divergence | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MethodRow) and self.method == other.method and self._shown() == other._shown()

    def __hash__(self) -> int:
        return hash(self.method)

    def _shown(self) -> tuple[Any, ...]:
        scores = (self.seen, self.unseen, self.mean, self.worst)
        return (
            self.measure,
            self.own,
            self.problem,
            self.missing,
            self.runs,
            *scores,
            self.spent,
            self.bytes_up,
            self.bytes_down,
            self.seconds,
        )

    def by(self, measure: str) -> MethodRow:
        return replace(self, measure=measure)

    @property
    def finished(self) -> bool:
        return any(run.finished for run in self.records)

    @property
    def is_complete(self) -> bool:
        return self.finished and not self.missing

    @property
    def state(self) -> str:
        return "finished" if self.finished else min(self.records, key=lambda run: run.reached).state

    @property
    def label(self) -> str:
        return f"{self.method} {MARK}" if self.missing else self.method

    @property
    def note(self) -> str:
        return format_missing(self.label, self.missing, self.seeds if self.finished else []) if self.missing else ""

    @property
    def failure(self) -> str:
        if self.divergence is None:
            return f"could not be run: {self.problem}"
        return f"{self.problem[:1].lower()}{self.problem[1:]}"

    @property
    def first(self) -> RunRecord:
        return self.counted[0]

    @cached_property
    def counted(self) -> list[RunRecord]:
        """The runs used for the statistics: one per seed, finished ones if there are any."""
        chosen: dict[int, RunRecord] = {}
        for run in sorted(self.records, key=lambda run: run.seed):
            if run.finished or not self.finished:
                chosen.setdefault(run.seed, run)
        return list(chosen.values())

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.counted]

    @cached_property
    def is_reference(self) -> bool:
        recorded = self.first.document.get("method", {}).get("pools_data")
        if recorded is not None:
            return bool(recorded)
        try:
            return parse(self.first.method).population is not None
        except PolyfedError:
            return False

    # ------------------------------------------------------------------------------------------------------------- scores

    def rounds(self, view: str) -> list[int]:
        return sorted(set.intersection(*(set(run.tables_of(self.measure)[view]) for run in self.counted)))

    def scores(self, view: str, key: Any, number: int) -> dict[int, float]:
        found = {run.seed: run.tables_of(self.measure)[view][number].get(key, math.nan) for run in self.counted}
        return found if all(map(math.isfinite, found.values())) else {}

    def finals(self, view: str, key: Any) -> dict[int, float]:
        found = {run.seed: run.final(view, self.measure).get(key, math.nan) for run in self.counted}
        return found if all(map(math.isfinite, found.values())) else {}

    def average(self, view: str, key: Any) -> float:
        return average(self.finals(view, key).values())

    def number(self, view: str, key: Any) -> Number | None:
        """Return the last score over seeds with its error, which is NaN if all other seeds are missing; None if it was not scored."""
        values = tuple(table[key] for run in self.counted if key in (table := run.final(view, self.measure)))
        if not values:
            return None
        if len(values) > 1 or math.isnan(values[0]):
            return Number(average(values), deviation(values) if all(map(math.isfinite, values)) else math.nan, values)
        return Number(values[0], math.nan if self.missing else self.test_error(view, key), values)

    def test_error(self, view: str, key: Any) -> float:
        """Return the standard error due to the test set sizes, which more seeds do not reduce; NaN if there is no simple formula."""
        domains = [name for name in self.first.final(view, self.measure) if isinstance(name, str)]
        if key == MEAN:
            return math.sqrt(sum(self.test_error(view, domain) ** 2 for domain in domains)) / len(domains)
        if key == WORST:
            worst = self.first.final(view, self.measure)[WORST]
            return next(self.test_error(view, name) for name in domains if self.first.final(view, self.measure)[name] == worst)
        if key == SPREAD:
            return math.nan
        sizes = [run.test_sizes.get((view, key), 0) for run in self.counted]
        last_rows = [found[max(found)] for run in self.counted if (found := run.rows[view])]
        has_one_client = all(sum(row.domain == key for row in rows) == 1 for rows in last_rows)
        if self.measure == "accuracy" and self.first.task.class_labels and has_one_client:
            return binomial_error(self.average(view, key), max(sizes))
        return average(run.test_error(view, key, self.measure) for run in self.counted)

    def confusion(self, view: str, domain: str) -> list[list[float]] | None:
        """Return the confusion matrix summed over seeds and clients; None if it was not recorded."""
        known = [matrix for run in self.counted if (matrix := run.domains.get((view, domain), {}).get("confusion"))]
        size = len(known[0]) if known else 0
        return [[sum(one[i][j] for one in known) for j in range(size)] for i in range(size)] if known else None

    def _numbers(self, view: str) -> dict[str, Number]:
        names = self.first.final(view, self.measure) if self.records else {}
        return {name: found for name in names if isinstance(name, str) and (found := self.number(view, name)) is not None}

    @cached_property
    def seen(self) -> dict[str, Number]:
        return self._numbers("seen")

    @cached_property
    def unseen(self) -> dict[str, Number]:
        return self._numbers("unseen")

    @property
    def mean(self) -> Number | None:
        """Mean over seen domains, or over unseen domains if there are no others."""
        return self.number("seen" if self.seen else "unseen", MEAN) if self.records else None

    @property
    def worst(self) -> Number | None:
        return self.number("seen" if self.seen else "unseen", WORST) if self.records else None

    # -------------------------------------------------------------------------------------------------------------- costs

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(part.path for run in self.records for part in run.folders if part.path)

    @property
    def answers(self) -> dict[int, Answers]:
        return {run.seed: run.answers for run in self.counted}

    @cached_property
    def _totals(self) -> list[Totals]:
        found = []
        for part in (part for run in self.counted for part in run.folders):
            clients = int(part.document.get("data", {}).get("clients") or 0)
            if part.costs and clients:
                sampled = Settings(clients_per_round=part.settings["clients_per_round"]).sampled(clients)
                found.append(totals(Costs.from_numbers(part.costs), clients, sampled, part.reached))
        return found

    @cached_property
    def spent(self) -> Spent:
        return spent(self._totals)

    def bytes_by_kind(self, direction: str, purpose: str = "training") -> dict[str, float]:
        found = [run.costs.get("bytes", {}).get(direction, {}).get(purpose, {}) for run in self.counted]
        return {kind: average(one.get(kind, 0) for one in found) for kind in dict.fromkeys(kind for one in found for kind in one)}

    def total_bytes(self, purpose: str = "training", directions: Sequence[str] = ("up", "down")) -> float:
        return sum(sum(self.bytes_by_kind(direction, purpose).values()) for direction in directions)

    @property
    def bytes_up(self) -> float:
        return self._per_client_and_round("up")

    @property
    def bytes_down(self) -> float:
        return self._per_client_and_round("down")

    def _per_client_and_round(self, direction: str) -> float:
        turns = sum(one.client_rounds for one in self._totals)
        return len(self.counted) * self.total_bytes(directions=[direction]) / turns if turns else math.nan

    @property
    def seconds(self) -> float:
        return self.average_cost("seconds", "training")

    def average_cost(self, what: str, *purposes: str) -> float:
        """Return a cost per run (seconds, messages), summed over purposes and averaged over seeds."""
        return average(sum(run.costs.get(what, {}).get(purpose, 0) for purpose in purposes) for run in self.counted)


@dataclass(frozen=True, eq=False)
class RunSet:
    """Methods on the same data, for one metric; ``left_out`` contains the domains of a leave-one-out comparison."""

    rows: Sequence[MethodRow]
    name: str = ""
    source: str = ""
    left_out: Sequence[str] = ()

    def by(self, measure: str) -> RunSet:
        return replace(self, rows=[row.by(measure) for row in self.rows])

    @property
    def measure(self) -> str:
        return next((row.measure for row in self.rows if not row.problem), "accuracy")

    @property
    def runs(self) -> list[RunRecord]:
        return [run for row in self.rows for run in row.records]

    @property
    def task(self) -> Task:
        return task_of_records(self.domains_scored())

    def headline(self, metric: str) -> Headline:
        """Return the primary metric: the requested one, or the one that the runs recorded."""
        return headline_of(metric, [part.document for run in self.runs for part in run.folders], self.domains_scored())

    def headed(self, metric: str) -> RunSet:
        """Return the same runs with their primary metric, or unchanged if no run has this metric."""
        found = self.by(self.headline(metric).measure)
        return found if any(row.finals(view, MEAN) for view in VIEWS for row in found.rows if row.records) else self

    def domains_scored(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the numbers of each domain from the first run that scored it."""
        return {key: numbers for run in reversed(self.runs) for key, numbers in run.domains.items()}

    def domains(self, view: str) -> list[str]:
        return list(dict.fromkeys(domain for run in self.runs for v, domain in run.test_sizes if v == view))

    @property
    def views(self) -> list[str]:
        return [view for view in VIEWS if self.domains(view)]

    @property
    def main_view(self) -> str:
        return "unseen" if self.left_out or not self.domains("seen") else "seen"

    def test_size(self, view: str, domain: str) -> int:
        return max((run.test_sizes.get((view, domain), 0) for run in self.runs), default=0)

    # ------------------------------------------------------------------------------------------------------------- tables

    def columns(self, view: str, totals: Sequence[str] = ("mean", "worst")) -> list[Column]:
        keys = {"mean": MEAN, "worst": WORST, "spread": SPREAD}
        domains = [Column(domain, view, domain) for domain in self.domains(view)]
        return [*domains, *(Column(name, view, keys[name]) for name in totals if len(domains) > 1)]

    def all_columns(self) -> list[Column]:
        """Return the columns of both views, with mean and worst of the main view."""
        view = self.main_view
        found = [Column(domain, view, domain) for domain in self.domains(view)]
        found += [Column("mean", view, MEAN), Column("worst", view, WORST)] if found else []
        return found + [Column(f"unseen: {name}", "unseen", name) for name in (self.domains("unseen") if view == "seen" else ())]

    def contenders(self, view: str) -> list[MethodRow]:
        """Return the methods to rank: finished for every seed, scored on every domain, and federated (unless none is)."""
        domains = self.domains(view)
        complete = [row for row in self.rows if row.is_complete and domains and all(row.finals(view, domain) for domain in domains)]
        return [row for row in complete if not row.is_reference] or complete

    def ranked(self, view: str, rows: Sequence[MethodRow] | None = None) -> list[MethodRow]:
        """Sort the methods by their mean over domains, best first; those without a score or with a missing seed are last."""
        sign = 1 if self.measure in SMALLER_IS_BETTER else -1

        def key(row: MethodRow) -> tuple[bool, float]:
            return not row.is_complete, sign * row.average(view, MEAN) if row.records and row.finals(view, MEAN) else math.inf

        return sorted(self.rows if rows is None else rows, key=key)

    def draw_dots(self, rows: Sequence[MethodRow], columns: Sequence[Column]) -> Any:
        """Draw a dot per method and column; whiskers are the deviation over seeds or, for one seed, the standard error of the test set."""
        points = [(row.label, [n and n[:2] for n, _ in self.cells(row, columns)]) for row in rows]
        baseline = self.baseline(columns)
        heights = [baseline.get(column, math.nan) for column in columns] if baseline else []
        return dots_figure([column.name for column in columns], points, MEASURES[self.measure], heights)

    @property
    def listed(self) -> list[MethodRow]:
        return sorted(self.rows, key=lambda row: not row.is_complete)

    def cells(self, row: MethodRow, columns: Sequence[Column]) -> list[Cell]:
        found = [row.number(c.view, c.key) if row.records and row.finals(c.view, c.key) else None for c in columns]
        return [Cell(number, row in self.best(column)) for number, column in zip(found, columns, strict=True)]

    def best(self, column: Column) -> list[MethodRow]:
        """Return the best contenders of a column; empty if all are equal or if the metric does not rank methods."""
        found = {row: row.average(column.view, column.key) for row in self.contenders(column.view)}
        ranks = self.measure not in NEITHER_IS_BETTER and column.key != SPREAD
        return _best_of(found, self.measure in SMALLER_IS_BETTER) if ranks else []

    def cheapest(self, what: str) -> list[MethodRow]:
        """Return the methods with the lowest ``bytes_up``, ``bytes_down`` or ``seconds``; empty if all are equal."""
        return _best_of({row: getattr(row, what) for row in self.rows if row.is_complete}, smaller=True)

    def baseline(self, columns: Sequence[Column]) -> dict[Column, float]:
        """Return the accuracy or balanced accuracy of always predicting the most frequent class."""
        known = self.domains_scored()
        found: dict[Column, float] = {}
        for column in columns:
            domains = [column.key] if isinstance(column.key, str) else self.domains(column.view)
            values = [self._majority_score(known.get((column.view, domain), {})) for domain in domains]
            value = dict(zip((MEAN, WORST, SPREAD), over_domains(values, self.measure), strict=True)).get(column.key, values[0])
            found |= {} if math.isnan(value) else {column: value}
        return found

    def _majority_score(self, numbers: Mapping[str, Any]) -> float:
        known = {"accuracy": numbers.get("majority_rate", math.nan), "balanced_accuracy": chance_of(numbers)}
        return float(known.get(self.measure, math.nan))


def _best_of(values: Mapping[MethodRow, float], smaller: bool) -> list[MethodRow]:
    top = (min if smaller else max)(values.values(), default=math.nan)
    chosen = [row for row, value in values.items() if abs(value - top) < EQUAL]
    return [] if len(chosen) == len(values) else chosen
