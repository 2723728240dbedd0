"""Represent the result of a comparison: a row per method, its costs, and notes on the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.runs.figures import as_image
from polyfed.runs.scores import BASELINE, headline_by_scores, warnings_over_seeds
from polyfed.runs.training_settings import describe_training
from polyfed.studies.compare.compare import LEAVE_ONE_OUT, ComparedRuns, ComparisonRun
from polyfed.studies.report.costs import NOTE, Expense, cost_json
from polyfed.studies.report.run_record import RunRecord, joined
from polyfed.studies.report.run_set import Column, MethodRow, Number, RunSet, chance_of
from polyfed.studies.report.sections import expenses
from polyfed.studies.report.verdict import lead
from polyfed.studies.report.words import capital, format_rounds, json_values, percent
from polyfed.tasks.known import CLASSIFICATION
from polyfed.tasks.metrics import MEASURES


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several methods on the same data, seeds and settings.

    Attributes:
        data: Name of the data.
        protocol: ``seen`` or ``leave-one-out``.
        seeds: Seeds of every method.
        rounds: Rounds of every run.
        model: Model of every run.
        rows: One row per method, in the order given; ``problem`` is set if a method could not be run.
        metric: Primary metric.
        metric_reason: Reason for this metric.
        warnings: One warning per method that is no better than always predicting the most frequent class.
        significance: Tests of the difference between the best two methods on the same test images.
        lead: The 95 % interval of the difference between the best two methods, as fractions; None if it is unknown.
        costs: Cost and privacy of each method, relative to fedavg if it was compared.
        test_sizes: Number of test images by domain.
        note: Explanation of the numbers.
        folder: Parent of the run folders; None if no files were written.
        planned: Number of runs.
        reused: Number of runs that had finished before.
    """

    data: str
    protocol: str
    seeds: tuple[int, ...]
    rounds: int
    rows: tuple[MethodRow, ...]
    costs: tuple[Expense, ...]
    test_sizes: Mapping[str, int]
    note: str
    folder: Path | None
    planned: int
    reused: int
    metric: str = "accuracy"
    metric_reason: str = ""
    warnings: tuple[str, ...] = ()
    significance: str = ""
    lead: tuple[float, float] | None = None
    model: str = ""

    @cached_property
    def run_set(self) -> RunSet:
        return RunSet(self.rows)

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why methods could not be run, by method."""
        return {row.method: row.problem for row in self.rows if row.problem}

    def best(self) -> MethodRow:
        """Return the method with the best mean over domains; the first one if several are equal."""
        ranked = [row for row in self.run_set.ranked(self.run_set.main_view) if row.records]
        if not ranked:
            raise PolyfedError(f"No method could be run. {' '.join(self.problems.values())}".strip())
        return ranked[0]

    def table(self, measure: str | None = None) -> Any:
        """Return a pandas frame with a row per method and a column per domain, then mean and worst, as fractions averaged over seeds.

        Args:
            measure: Metric, such as accuracy, balanced_accuracy, macro_f1, auroc or calibration_error. Default: the primary metric.
        """
        chosen = measure or self.metric
        if chosen not in MEASURES:
            raise SettingError(f"Unknown metric {chosen!r}. {nearest(chosen, MEASURES)}")
        pandas = require_pandas("table()")
        rows = {}
        for row in self.rows:
            if row.records:
                numbers = _numbers(row.by(chosen), self.run_set.all_columns())
                rows[row.method] = {column.name: number.value for column, number in numbers.items()}
        frame = pandas.DataFrame.from_dict(rows, orient="index")
        frame.index.name, frame.columns.name = "method", chosen
        return frame

    def metrics(self) -> Any:
        """Return a pandas frame with every metric, one row per method, seed, view and domain."""
        pandas = require_pandas("metrics()")
        return pandas.DataFrame(
            [
                {
                    "method": row.method,
                    "seed": run.seed,
                    "view": view,
                    "domain": domain,
                    **{name: float(numbers.get(name, math.nan)) for name in (*run.task.measures, "majority_rate")},
                    "chance": chance_of(numbers),
                    "test_images": numbers["count"],
                }
                for row in self.rows
                for run in row.records
                for (view, domain), numbers in run.domains.items()
            ]
        )

    def plot(self) -> Any:
        """Draw the table as a matplotlib figure, with one dot and error bar per method and domain."""
        return self.run_set.draw_dots([row for row in self.rows if row.records], self.run_set.all_columns())

    def as_json(self) -> dict[str, Any]:
        """Return the comparison in the form that ``polyfed compare --json`` prints."""
        costs = {cost.method: cost for cost in self.costs}
        baseline = self.run_set.baseline(self.run_set.all_columns())
        found: dict[str, Any] = json_values(
            {
                **({"warning": " ".join(self.warnings)} if self.warnings else {}),
                "data": self.data,
                "protocol": self.protocol,
                "seeds": self.seeds,
                "rounds": self.rounds,
                "model": self.model,
                "metric": self.metric,
                "metric_reason": self.metric_reason,
                "baseline": {column.name: value for column, value in baseline.items()},
                "significance": self.significance,
                "methods": [row_json(row, costs.get(row.method)) for row in self.rows],
                "note": self.note,
                "costs_note": NOTE,
                "out": None if self.folder is None else str(self.folder),
            }
        )
        return found

    def _cells(self) -> list[list[str]]:
        columns = self.run_set.all_columns()
        found = [[f"{MEASURES[self.metric]}, %", *(column.name for column in columns)]]
        for row in self.rows:
            numbers = _numbers(row, columns)
            found.append([row.method, *(percent(*numbers[c][:2]) if c in numbers else "-" for c in columns)])
        baseline = self.run_set.baseline(columns)
        if baseline:
            found.append([f"({BASELINE})", *(percent(baseline[c]) if c in baseline else "-" for c in columns)])
        return found

    def _caption(self) -> str:
        return f"{self.data}, {self.protocol}, {format_rounds(self.rounds)}"

    def _problem_lines(self) -> list[str]:
        return [f"{row.method} {row.failure}" for row in self.rows if row.problem]

    def __repr__(self) -> str:
        cells = self._cells()
        first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join([method.ljust(first), *(text.rjust(width) for text, width in zip(numbers, widths, strict=True))]).rstrip()
            for method, *numbers in cells
        ]
        return "\n".join([*self.warnings, self._caption(), *lines, *self._problem_lines()])

    def _repr_html_(self) -> str:
        head, *lines = self._cells()
        top = "".join(f"<th>{escape(text)}</th>" for text in head)
        rows = "".join(
            f"<tr><td>{escape(method)}</td>"
            + "".join(f'<td style="white-space:nowrap">{escape(number)}</td>' for number in numbers)
            + "</tr>"
            for method, *numbers in lines
        )
        problems = "".join(f"<p>{escape(line)}</p>" for line in self._problem_lines())
        warnings = "".join(f"<p><b>{escape(text)}</b></p>" for text in self.warnings)
        significance = f"<p>{escape(self.significance)}</p>" if self.significance else ""
        figure = as_image(self.plot(), 70) if any(row.mean is not None for row in self.rows) else ""
        caption = escape(self._caption())
        return f"{warnings}<table><caption>{caption}</caption><tr>{top}</tr>{rows}</table>{significance}{problems}{figure}"


def require_pandas(what: str) -> Any:
    """Import pandas, or raise an error with installation instructions."""
    try:
        import pandas
    except ImportError as error:
        raise PolyfedError(f"{what} requires pandas. Install it with: pip install 'polyfed[pandas]'.") from error
    return pandas


def _numbers(row: MethodRow, columns: Sequence[Column]) -> dict[Column, Number]:
    """Return the numbers of a row, without columns that it has no score for."""
    found = {column: row.number(column.view, column.key) for column in columns} if row.records else {}
    return {column: number for column, number in found.items() if number is not None}


def row_json(row: MethodRow, cost: Expense | None = None) -> dict[str, Any]:
    measures = row.first.task.measures if row.records else CLASSIFICATION.measures
    return {
        "method": row.method,
        "own_settings": dict(row.own),
        "headline": _table_json(row),
        **{name: _table_json(row.by(name)) for name in measures},
        "bytes_up_per_client_and_round": row.bytes_up,
        "bytes_down_per_client_and_round": row.bytes_down,
        "seconds": row.seconds,
        "costs": None if cost is None else cost_json(cost),
        "runs": row.runs,
        "problem": row.problem or None,
        "diverged": row.divergence and row.divergence.as_json(),
    }


def _table_json(row: MethodRow) -> dict[str, Any]:
    def plain(number: Number | None) -> dict[str, Any] | None:
        return None if number is None else {"mean": number.value, "error": number.error, "values": number.values}

    views = {"seen": row.seen, "unseen": row.unseen}
    by_view: dict[str, Any] = {view: {domain: plain(n) for domain, n in found.items()} for view, found in views.items()}
    return {**by_view, "mean": plain(row.mean), "worst": plain(row.worst)}


def compare_runs(runs: ComparedRuns) -> Comparison:
    """Train the missing runs and summarise all of them."""
    found = runs.train(RunRecord.from_result)
    # If no run succeeded, there are no records to choose the metric from.
    chosen = runs.headline if found else headline_by_scores(runs.settings.metric, {})
    rows = tuple(
        MethodRow(label, measure=chosen.measure, own=one.own, problem=runs.problems[label], divergence=runs.divergences.get(label))
        if label in runs.problems
        else MethodRow(label, _by_seed(found, label), chosen.measure, one.own)
        for label, one in runs.methods.items()
    )
    rounds = found[-1][1].reached if found else runs.settings.rounds
    run_set = RunSet(rows)
    sizes = {domain: size for run in run_set.runs for (_, domain), size in run.test_sizes.items()}
    first = lead(run_set, run_set.main_view)
    images = None if first is None else first.images
    compared = (
        "" if first is None or images is None else f"{first.ahead.method} (first) compared with {first.behind.method} (second): "
    )
    return Comparison(
        data=runs.settings.data,
        protocol=runs.protocol,
        seeds=runs.seeds,
        rounds=rounds,
        rows=rows,
        costs=tuple(expenses(rows)),
        test_sizes=sizes,
        note=_footnote(runs, rounds, sizes, chosen.words),
        model=runs.model_name,
        folder=runs.folder,
        planned=len(runs.runs),
        reused=runs.reused,
        metric=chosen.measure,
        metric_reason=chosen.reason,
        warnings=tuple(text for row in rows for text in _warnings(row, found)),
        significance="" if images is None else compared + images.summary,
        lead=None if images is None else (images.low, images.high),
    )


def _by_seed(found: Sequence[tuple[ComparisonRun, RunRecord]], label: str) -> list[RunRecord]:
    """Return one record per seed of a method, joining leave-one-out runs."""
    by_seed: dict[int, list[RunRecord]] = {}
    for run, record in found:
        if run.method == label:
            by_seed.setdefault(run.seed, []).append(record)
    left_out = {run.left_out for run, _ in found if run.left_out is not None}
    return [joined(many, left_out) if left_out else many[0] for many in by_seed.values()]


def _warnings(row: MethodRow, found: Sequence[tuple[ComparisonRun, RunRecord]]) -> list[str]:
    """Warn if a method is no better than a constant prediction, or if its last round is an outlier."""
    outliers = [f"{run.words}: {record.outlier}" for run, record in found if run.method == row.method and record.outlier]
    return [*warnings_over_seeds({run.seed: run.domains for run in _by_seed(found, row.method)}, row.method), *outliers]


def _footnote(runs: ComparedRuns, rounds: int, sizes: Mapping[str, int], measure: str) -> str:
    settings, seeds = runs.settings, runs.seeds
    if len(seeds) > 1:
        meaning = f"± is the sample standard deviation over {len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"
    else:
        meaning = f"± is the standard error of one run (seed {seeds[0]}) due to the size of its test set"
    epochs = f"{settings.local_epochs} local epoch{'s' * (settings.local_epochs > 1)}"
    work = epochs if settings.local_steps is None else f"{settings.local_steps} local steps"
    length = f"{format_rounds(rounds)} of {work}; {describe_training(settings, runs.origins)}"
    length += ", except for per-method settings" if any(one.own for one in runs.methods.values()) else ""
    tested = "all images" if settings.unseen_part == "all" else "the test split"
    unseen = f" Each column is the {measure} of the newcomer on {tested} of a domain held out of training."
    counts = ", ".join(f"{domain} {count}" for domain, count in sizes.items())
    return (
        f"{capital(measure)} in %; {meaning}. {length}.{unseen if runs.protocol == LEAVE_ONE_OUT else ''} "
        "MB: training traffic per client and round. s: training seconds per seed."
        f"{f' Model: {runs.model_name}.' if runs.model_name else ''} Data: {runs.data.source or settings.data}. "
        f"Test images: {counts or 'none scored'}."
    )
