"""The outcome of a comparison: a row for each method, what it cost, and what the numbers mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.runs.figures import as_image, dots_figure
from polyfed.runs.scores import BASELINE, headline_by_scores, warnings_over_seeds
from polyfed.runs.training_settings import describe_training
from polyfed.studies.compare.compare import LEAVE_ONE_OUT, ComparedRuns, ComparisonRun
from polyfed.studies.report.costs import NOTE, Expense, cost_json
from polyfed.studies.report.run_record import RunRecord, joined
from polyfed.studies.report.run_set import Column, MethodRow, Number, RunSet, chance_of
from polyfed.studies.report.sections import expenses
from polyfed.studies.report.verdict import lead
from polyfed.studies.report.words import json_values, percent, rounds_words
from polyfed.tasks.known import CLASSIFICATION
from polyfed.tasks.metrics import MEASURES


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several methods in one table, over the same data, seeds and settings.

    Attributes:
        data: the name of the data.
        protocol: ``seen`` or ``leave-one-out``.
        seeds: the seeds of every method.
        rounds: the rounds of every run.
        model: the model of every run.
        rows: a row for each method, in the order given; ``problem`` is set where a method could not be run.
        metric: the measure of the table, and ``metric_reason`` why it is this one (``--metric``).
        warnings: a sentence for each method that does no better than always answering the most frequent class.
        significance: how surely the best is ahead of the next, on the same test images and over seeds.
        lead: the 95 % interval of the best less the next, as fractions; None where their answers cannot be compared.
        costs: cost and privacy of each method that was run, next to fedavg where it was compared.
        test_sizes: test images by domain.
        note: what the numbers mean, in sentences.
        folder: where the run folders are; None where nothing was written.
        planned: the number of runs.
        reused: how many of them were finished already.
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
        """The rows as one set, which computes what tables print."""
        return RunSet(self.rows)

    @property
    def problems(self) -> dict[str, str]:
        """Why methods could not be run, by their text."""
        return {row.method: row.problem for row in self.rows if row.problem}

    def best(self) -> MethodRow:
        """The method with the best mean over domains; the first of equals."""
        ranked = [row for row in self.run_set.ranked(self.run_set.main_view) if row.records]
        if not ranked:
            raise PolyfedError(f"No method could be run. {' '.join(self.problems.values())}".strip())
        return ranked[0]

    def table(self, measure: str | None = None) -> Any:
        """A pandas frame: a row for each method, a column for each domain, then mean and worst, as fractions averaged over seeds.

        Args:
            measure: accuracy, balanced_accuracy, macro_f1, auroc, calibration_error...; default: that of the comparison.
        """
        chosen = measure or self.metric
        if chosen not in MEASURES:
            raise SettingError(f"There is no measure {chosen!r}. {nearest(chosen, MEASURES)}")
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
        """A pandas frame with every measure: a row for each method, seed, view and domain."""
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
        """The table as a matplotlib figure: a dot for each method and domain, with its error."""
        columns = self.run_set.all_columns()
        rows = []
        for row in (row for row in self.rows if row.records):
            numbers = _numbers(row, columns)
            rows.append((row.method, [numbers[c][:2] if c in numbers else None for c in columns]))
        by_chance = self.run_set.baseline(columns)
        heights = [by_chance.get(column, math.nan) for column in columns] if by_chance else []
        return dots_figure([column.name for column in columns], rows, MEASURES[self.metric], heights)

    def as_json(self) -> dict[str, Any]:
        """The comparison as ``polyfed compare --json`` prints it."""
        costs = {cost.method: cost for cost in self.costs}
        by_chance = self.run_set.baseline(self.run_set.all_columns())
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
                "baseline": {column.name: value for column, value in by_chance.items()},
                "significance": self.significance,
                "methods": [row_json(row, costs.get(row.method)) for row in self.rows],
                "note": self.note,
                "costs_note": NOTE,
                "out": None if self.folder is None else str(self.folder),
            }
        )
        return found

    def _cells(self) -> list[list[str]]:
        """The accuracy table as texts, headed by the names of its columns."""
        columns = self.run_set.all_columns()
        found = [[f"{MEASURES[self.metric]}, %", *(column.name for column in columns)]]
        for row in self.rows:
            numbers = _numbers(row, columns)
            found.append([row.method, *(percent(*numbers[c][:2]) if c in numbers else "-" for c in columns)])
        by_chance = self.run_set.baseline(columns)
        if by_chance:
            found.append([f"({BASELINE})", *(percent(by_chance[c]) if c in by_chance else "-" for c in columns)])
        return found

    def __repr__(self) -> str:
        cells = self._cells()
        widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
        lines = [
            "  ".join(
                text.rjust(width) if place else text.ljust(width)
                for place, (text, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in cells
        ]
        problems = [f"{method} could not be run: {problem}" for method, problem in self.problems.items()]
        return "\n".join(
            [
                *self.warnings,
                f"{self.data}, {self.protocol}, {rounds_words(self.rounds)}",
                *(line.rstrip() for line in lines),
                *problems,
            ]
        )

    def _repr_html_(self) -> str:
        head, *lines = self._cells()
        top = "".join(f"<th>{escape(text)}</th>" for text in head)
        rows = "".join(
            f"<tr><td>{escape(method)}</td>"
            + "".join(f'<td style="white-space:nowrap">{escape(number)}</td>' for number in numbers)
            + "</tr>"
            for method, *numbers in lines
        )
        problems = "".join(
            f"<p>{escape(method)} could not be run: {escape(problem)}</p>" for method, problem in self.problems.items()
        )
        caption = escape(f"{self.data}, {self.protocol}, {rounds_words(self.rounds)}")
        warned = "".join(f"<p><b>{escape(text)}</b></p>" for text in self.warnings)
        sure = f"<p>{escape(self.significance)}</p>" if self.significance else ""
        picture = as_image(self.plot(), 70) if any(row.mean is not None for row in self.rows) else ""
        return f"{warned}<table><caption>{caption}</caption><tr>{top}</tr>{rows}</table>{sure}{problems}{picture}"


def require_pandas(what: str) -> Any:
    """Pandas, or a sentence that says how to get it."""
    try:
        import pandas
    except ImportError as error:
        raise PolyfedError(f"{what} returns a pandas frame, and pandas is not installed: pip install 'polyfed[pandas]'.") from error
    return pandas


def _numbers(row: MethodRow, columns: Sequence[Column]) -> dict[Column, Number]:
    """The numbers of a row; a column that it has none for is left out."""
    found = {column: row.number(column.view, column.key) for column in columns} if row.records else {}
    return {column: number for column, number in found.items() if number is not None}


def row_json(row: MethodRow, cost: Expense | None = None) -> dict[str, Any]:
    """A row as JSON; ``cost`` sets it beside the reference."""
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
    }


def _table_json(row: MethodRow) -> dict[str, Any]:
    def plain(number: Number | None) -> dict[str, Any] | None:
        return None if number is None else {"mean": number.value, "error": number.error, "values": number.values}

    views = {"seen": row.seen, "unseen": row.unseen}
    by_view: dict[str, Any] = {view: {domain: plain(n) for domain, n in found.items()} for view, found in views.items()}
    return {**by_view, "mean": plain(row.mean), "worst": plain(row.worst)}


def compare_runs(runs: ComparedRuns) -> Comparison:
    """Train what is missing, and put the outcomes in one table."""
    found = runs.train(RunRecord.from_result)
    # If no run succeeded, there is nothing to choose for.
    chosen = runs.headline if found else headline_by_scores(runs.settings.metric, {})
    rows = tuple(
        MethodRow(label, measure=chosen.measure, own=one.own, problem=runs.problems[label])
        if label in runs.problems
        else MethodRow(label, _by_seed(found, label), chosen.measure, one.own)
        for label, one in runs.methods.items()
    )
    rounds = found[-1][1].reached if found else runs.settings.rounds
    together = RunSet(rows)
    sizes = {domain: size for run in together.runs for (_, domain), size in run.test_sizes.items()}
    first = lead(together, together.main_view)
    images = None if first is None else first.images
    return Comparison(
        data=runs.settings.data,
        protocol=runs.protocol,
        seeds=runs.seeds,
        rounds=rounds,
        rows=rows,
        costs=tuple(expenses(rows)),
        test_sizes=sizes,
        note=_footnote(runs, rounds, sizes, chosen.words),
        model=runs.model_words,
        folder=runs.folder,
        planned=len(runs.runs),
        reused=runs.reused,
        metric=chosen.measure,
        metric_reason=chosen.reason,
        warnings=tuple(text for row in rows for text in _warned(row, found)),
        significance=""
        if first is None or images is None
        else f"{first.ahead.method} against {first.behind.method}: {images.words}",
        lead=None if images is None else (images.low, images.high),
    )


def _by_seed(found: Sequence[tuple[ComparisonRun, RunRecord]], label: str) -> list[RunRecord]:
    """One record for each seed of a method; several of a seed are runs that each left out one domain."""
    by_seed: dict[int, list[RunRecord]] = {}
    for run, record in found:
        if run.method == label:
            by_seed.setdefault(run.seed, []).append(record)
    left_out = {run.left_out for run, _ in found if run.left_out is not None}
    return [joined(many, left_out) if left_out else many[0] for many in by_seed.values()]


def _warned(row: MethodRow, found: Sequence[tuple[ComparisonRun, RunRecord]]) -> list[str]:
    """Warn if a method is no better than always answering the most frequent class, or if its last round is an outlier."""
    outliers = [f"{run.words}: {record.outlier}" for run, record in found if run.method == row.method and record.outlier]
    return [*warnings_over_seeds({run.seed: run.domains for run in _by_seed(found, row.method)}, row.method), *outliers]


def _footnote(runs: ComparedRuns, rounds: int, sizes: Mapping[str, int], measure: str) -> str:
    """What the table means, in sentences."""
    settings, seeds = runs.settings, runs.seeds
    if len(seeds) > 1:
        meaning = f"± is the sample standard deviation over {len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"
    else:
        meaning = f"± is the standard error of one run (seed {seeds[0]}) from the size of its test"
    epochs = f"{settings.local_epochs} local epoch{'s' * (settings.local_epochs > 1)}"
    work = epochs if settings.local_steps is None else f"{settings.local_steps} local steps"
    length = f"{rounds_words(rounds)} of {work}; {describe_training(settings, runs.origins)}"
    length += ", where a method's row does not say otherwise" if any(one.own for one in runs.methods.values()) else ""
    tested = "all images of" if settings.unseen_part == "all" else "the test part of"
    unseen = f" Each column is the {measure} of the newcomer on {tested} a domain that nobody trained on."
    counts = ", ".join(f"{domain} {count}" for domain, count in sizes.items())
    return (
        f"{measure[0].upper()}{measure[1:]} in %; {meaning}. {length}.{unseen if runs.protocol == LEAVE_ONE_OUT else ''} MB are training traffic per client and round; "
        f"s are the seconds of training per seed.{f' Model: {runs.model_words}.' if runs.model_words else ''} Data: {runs.data.source or settings.data}. Test images: {counts or 'none scored'}."
    )
