"""The outcome of a comparison: a row for each method, what it cost, and what the numbers mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from polyfed.core.evaluation import Row
from polyfed.core.metrics import MEASURES
from polyfed.errors import PolyfedError, SettingError, nearest
from polyfed.runs.figures import as_image, dots_figure
from polyfed.runs.headline import BASELINE, domains_of, headline_by_scores, warnings_over_seeds
from polyfed.runs.training_defaults import training_words
from polyfed.settings import Settings
from polyfed.studies.compare.compare import LEAVE_ONE_OUT, ComparedRuns, ComparisonRun
from polyfed.studies.report.costs import NOTE, Expense
from polyfed.studies.report.json_values import json_values
from polyfed.studies.report.paired_tests import ImageTest, image_test
from polyfed.studies.report.tables import (
    MethodRow,
    Summary,
    baseline_of,
    column_names,
    cost_table,
    domain_rows,
    left_out_in_turn,
    method_row,
    outcome,
    percent,
    rounds_words,
    row_json,
)


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
        certainty: how surely the best is ahead of the next, on the same test images and over seeds.
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
    certainty: str = ""
    lead: tuple[float, float] | None = None
    model: str = ""

    @property
    def problems(self) -> dict[str, str]:
        """Why methods could not be run, by their text."""
        return {row.method: row.problem for row in self.rows if row.problem}

    def best(self) -> MethodRow:
        """The method with the best mean over domains; the first of equals."""
        ranked = [(row.mean.value, row) for row in self.rows if row.mean is not None]
        if not ranked:
            raise PolyfedError(f"No method could be run. {' '.join(self.problems.values())}".strip())
        return max(ranked, key=lambda pair: pair[0])[1]

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
            if row.tables:
                looked_at = replace(row, **row.tables[chosen])
                rows[row.method] = {name: number.value for name, number in looked_at.columns().items()}
        frame = pandas.DataFrame.from_dict(rows, orient="index")
        frame.index.name, frame.columns.name = "method", chosen
        return frame

    def metrics(self) -> Any:
        """A pandas frame with every measure: a row for each method, seed, view and domain."""
        pandas = require_pandas("metrics()")
        return pandas.DataFrame([{"method": row.method, **record} for row in self.rows for record in row.records])

    def plot(self) -> Any:
        """The table as a matplotlib figure: a dot for each method and domain, with its error."""
        columns = column_names(self.rows)
        rows = []
        for row in self.rows:
            numbers = row.columns()
            if numbers:
                rows.append((row.method, [(numbers[c].value, numbers[c].error) if c in numbers else None for c in columns]))
        by_chance = baseline_of(self.rows, self.metric)
        return dots_figure(columns, rows, MEASURES[self.metric], [by_chance.get(c, math.nan) for c in columns] if by_chance else [])

    def as_json(self) -> dict[str, Any]:
        """The comparison as ``polyfed compare --json`` prints it."""
        costs = {cost.method: cost for cost in self.costs}
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
                "baseline": baseline_of(self.rows, self.metric),
                "certainty": self.certainty,
                "methods": [row_json(row, costs.get(row.method)) for row in self.rows],
                "note": self.note,
                "costs_note": NOTE,
                "out": None if self.folder is None else str(self.folder),
            }
        )
        return found

    def _cells(self) -> list[list[str]]:
        """The accuracy table as texts, headed by the names of its columns."""
        columns = column_names(self.rows)
        found = [[f"{MEASURES[self.metric]}, %", *columns]]
        for row in self.rows:
            numbers = row.columns()
            found.append([row.method, *(percent(numbers[c].value, numbers[c].error) if c in numbers else "-" for c in columns)])
        by_chance = baseline_of(self.rows, self.metric)
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
        sure = f"<p>{escape(self.certainty)}</p>" if self.certainty else ""
        picture = as_image(self.plot(), 70) if any(row.mean is not None for row in self.rows) else ""
        return f"{warned}<table><caption>{caption}</caption><tr>{top}</tr>{rows}</table>{sure}{problems}{picture}"


def require_pandas(what: str) -> Any:
    """Pandas, or a sentence that says how to get it."""
    try:
        import pandas
    except ImportError as error:
        raise PolyfedError(f"{what} returns a pandas frame, and pandas is not installed: pip install 'polyfed[pandas]'.") from error
    return pandas


def compare_runs(runs: ComparedRuns) -> Comparison:
    """Train what is missing, and put the outcomes in one table."""
    found = runs.train(outcome)
    # If no run succeeded, there is nothing to choose for.
    chosen = runs.headline if found else headline_by_scores(runs.settings.metric, {})
    rows = tuple(
        MethodRow(label, problem=runs.problems[label], own=one.own)
        if label in runs.problems
        else method_row(label, over_domains([(run, made) for run, made in found if run.method == label]), chosen.measure, one.own)
        for label, one in runs.methods.items()
    )
    rounds = found[-1][1]["rounds"] if found else runs.settings.rounds
    sizes, lead = tested_images(found), best_against_next(rows, chosen.measure)
    return Comparison(
        data=runs.settings.data,
        protocol=runs.protocol,
        seeds=runs.seeds,
        rounds=rounds,
        rows=rows,
        costs=tuple(cost_table(rows, {label: one.method for label, one in runs.methods.items()})),
        test_sizes=sizes,
        note=footnote(
            runs.settings,
            runs.seeds,
            runs.protocol,
            rounds,
            sizes,
            runs.data.source,
            chosen.words,
            any(row.own for row in rows),
            runs.model_words,
            runs.origins,
        ),
        model=runs.model_words,
        folder=runs.folder,
        planned=len(runs.runs),
        reused=runs.reused,
        metric=chosen.measure,
        metric_reason=chosen.reason,
        warnings=tuple(text for method in runs.methods for text in warned(method, found)),
        certainty="" if lead is None else f"{lead.first} against {lead.second}: {lead.test.words}",
        lead=None if lead is None else (lead.test.low, lead.test.high),
    )


def tested_domains(found: Sequence[tuple[ComparisonRun, Summary]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The scores of the domains that the table is about; what classes they hold is the same for every method."""
    rows = [
        Row(score["view"], score["client"], score["domain"], score)
        for run, made in found
        for score in made["scores"]
        if run.left_out is None or score["view"] == "unseen"
    ]
    return domains_of(rows)


def warned(method: str, found: Sequence[tuple[ComparisonRun, Summary]]) -> list[str]:
    """Warn if a method is no better than always answering the most frequent class, or if its last round is an outlier."""
    mine = [(run, made) for run, made in found if run.method == method]
    seeds = dict.fromkeys(run.seed for run, _ in mine)
    by_seed = {seed: tested_domains([(run, made) for run, made in mine if run.seed == seed]) for seed in seeds}
    outliers = [f"{run.words}: {made['last_rounds']['warning']}" for run, made in mine if "warning" in made.get("last_rounds", {})]
    return [*warnings_over_seeds(by_seed, method), *outliers]


class Lead(NamedTuple):
    """The best method, the next, and how they differ on the same test images."""

    first: str
    second: str
    test: ImageTest


def best_against_next(rows: Sequence[MethodRow], measure: str) -> Lead | None:
    """How surely the best method is ahead of the next; None where there is nothing to compare."""
    ranked = sorted((row for row in rows if row.mean is not None), key=lambda row: -row.mean.value if row.mean else 0.0)
    if len(ranked) < 2 or measure not in ("accuracy", "balanced_accuracy"):
        return None
    first, second = ranked[:2]
    found = image_test(first.answers, second.answers, "seen" if first.seen else "unseen", measure == "balanced_accuracy")
    return None if found is None else Lead(first.method, second.method, found)


def over_domains(found: Sequence[tuple[ComparisonRun, Summary]]) -> list[Summary]:
    """One summary for each seed; several of a seed are runs that each left out one domain."""
    by_seed: dict[int, list[Summary]] = {}
    for run, made in found:
        by_seed.setdefault(run.seed, []).append(made)
    return [many[0] if len(many) == 1 else left_out_in_turn(many) for many in by_seed.values()]


def tested_images(found: Sequence[tuple[ComparisonRun, Summary]]) -> dict[str, int]:
    """Test images by domain; where domains are left out in turn, those of the domains left out."""
    return {
        row.domain: row.count for run, made in found for row in domain_rows(made) if run.left_out is None or row.view == "unseen"
    }


def footnote(
    settings: Settings,
    seeds: Sequence[int],
    protocol: str,
    rounds: int,
    sizes: Mapping[str, int],
    source: str,
    measure: str,
    some_have_their_own: bool = False,
    model: str = "",
    origins: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """What the table means, in sentences; some methods may have settings of their own."""
    if len(seeds) > 1:
        meaning = f"± is the sample standard deviation over {len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"
    else:
        meaning = f"± is the standard error of one run (seed {seeds[0]}) from the size of its test"
    epochs = f"{settings.local_epochs} local epoch{'s' * (settings.local_epochs > 1)}"
    work = epochs if settings.local_steps is None else f"{settings.local_steps} local steps"
    length = f"{rounds_words(rounds)} of {work}; {training_words(settings, origins)}"
    length += ", where a method's row does not say otherwise" if some_have_their_own else ""
    tested = "all images of" if settings.unseen_part == "all" else "the test part of"
    unseen = f" Each column is the {measure} of the newcomer on {tested} a domain that nobody trained on."
    counts = ", ".join(f"{domain} {count}" for domain, count in sizes.items())
    return (
        f"{measure[0].upper()}{measure[1:]} in %; {meaning}. {length}.{unseen if protocol == LEAVE_ONE_OUT else ''} MB are training traffic per client and round; "
        f"s are the seconds of training per seed.{f' Model: {model}.' if model else ''} Data: {source or settings.data}. Test images: {counts or 'none scored'}."
    )
