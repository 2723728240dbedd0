"""Represent the result of a comparison: a row per method, its costs, and notes on the numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
from polyfed.studies.report.run_record import RunRecord, chance_of, joined
from polyfed.studies.report.run_set import MethodRow, Number, RunSet
from polyfed.studies.report.sections import expenses
from polyfed.studies.report.verdict import Verdict, verdicts_of
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
        rows: One row per method, in the order given. ``problem`` is set if a method could not be run, ``missing`` if some of its
            seeds could not; such a method is not ranked.
        metric: Primary metric.
        metric_reason: Reason for this metric.
        warnings: One warning per method that is no better than always predicting the most frequent class.
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
    model: str = ""

    @cached_property
    def run_set(self) -> RunSet:
        found = RunSet(self.rows)
        return replace(found, left_out=found.domains("unseen")) if self.protocol == LEAVE_ONE_OUT else found

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict on each view, as in the report; empty for a single method."""
        return verdicts_of(self.run_set) if len(self.rows) > 1 else []

    @property
    def significance(self) -> str:
        """The verdicts as text: the best method, and how significant its lead is over seeds and test images."""
        return " ".join(verdict.text for verdict in self.verdicts)

    @property
    def lead(self) -> tuple[float, float] | None:
        """The 95 % interval of the difference between the best two methods, as fractions; None if it is unknown.

        It is the interval over seeds or, for one seed, over its test images.
        """
        main = next((one for one in self.verdicts if one.view == self.run_set.main_view and one.differences), None)
        return None if main is None else main.differences[0].ends

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why methods could not be run with all seeds, by method."""
        return {row.method: row.problem or row.note for row in self.rows if row.problem or row.missing}

    def best(self) -> MethodRow:
        """Return the method with the best mean over domains; the first one if several are equal."""
        runs, view = self.run_set, self.run_set.main_view
        ranked = runs.ranked(view, runs.contenders(view)) or [row for row in runs.ranked(view) if row.is_complete]
        if not ranked:
            raise PolyfedError(f"No method could be run with all seeds. {' '.join(self.problems.values())}".strip())
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
                columns = self.run_set.all_columns()
                cells = self.run_set.cells(row.by(chosen), columns)
                rows[row.method] = {c.name: cell.number.value for c, cell in zip(columns, cells, strict=True) if cell.number}
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
                "verdicts": [verdict.as_json() for verdict in self.verdicts],
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
        for row in self.run_set.listed:
            cells = self.run_set.cells(row, columns)
            found.append([row.label, *("-" if cell.number is None else percent(*cell.number[:2]) for cell in cells)])
        baseline = self.run_set.baseline(columns)
        if baseline:
            found.append([f"({BASELINE})", *(percent(baseline[c]) if c in baseline else "-" for c in columns)])
        return found

    def _caption(self) -> str:
        return f"{self.data}, {self.protocol}, {format_rounds(self.rounds)}"

    def _problem_lines(self) -> list[str]:
        return [row.note or f"{row.method} {row.failure}" for row in self.rows if row.missing or row.problem]

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
        "missing": {str(seed): reason for seed, reason in row.missing.items()},
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
    rows = tuple(_row(runs, label, _by_seed(runs, found, label), chosen.measure) for label in runs.methods)
    rounds = found[-1][1].reached if found else runs.settings.rounds
    run_set = RunSet(rows)
    sizes = {domain: size for run in run_set.runs for (_, domain), size in run.test_sizes.items()}
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
    )


def _row(runs: ComparedRuns, label: str, records: Sequence[RunRecord], measure: str) -> MethodRow:
    """Return the row of a method. The seeds after one that failed were not run."""
    complete, own, problem = [run for run in records if run.finished], runs.methods[label].own, runs.problems.get(label, "")
    if not complete and problem:
        return MethodRow(label, measure=measure, own=own, problem=problem, divergence=runs.divergences.get(label))
    done = {run.seed for run in complete}
    return MethodRow(
        label, complete, measure, own, missing=missing_seeds(runs.seeds, done, runs.failed.get(label, runs.seeds[0]), problem)
    )


def missing_seeds(seeds: Sequence[int], done: Collection[int], failed: int, problem: str) -> dict[int, str]:
    """Return the seeds without a finished run, with the reasons: ``problem`` for the seed that failed, which ended the others."""
    return {seed: problem if seed == failed else f"not run, because seed {failed} failed" for seed in seeds if seed not in done}


def _by_seed(runs: ComparedRuns, found: Sequence[tuple[ComparisonRun, RunRecord]], label: str) -> list[RunRecord]:
    """Return one record per seed of a method, joining leave-one-out runs."""
    by_seed: dict[int, list[RunRecord]] = {}
    for run, record in found:
        if run.method == label:
            by_seed.setdefault(run.seed, []).append(record)
    left_out = {run.left_out for run in runs.runs if run.left_out is not None}
    return [joined(many, left_out) if left_out else many[0] for many in by_seed.values()]


def _warnings(row: MethodRow, found: Sequence[tuple[ComparisonRun, RunRecord]]) -> list[str]:
    """Warn if a method is no better than a constant prediction, or if its last round is an outlier."""
    outliers = [f"{run.words}: {record.outlier}" for run, record in found if run.method == row.method and record.outlier]
    return [*warnings_over_seeds({run.seed: run.domains for run in row.records}, row.method), *outliers]


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
