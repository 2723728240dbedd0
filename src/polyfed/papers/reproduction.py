"""Reproduce an experiment: train missing runs, read existing ones, and compare every cell with the published number."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from polyfed.core.data_types import DataSet
from polyfed.core.evaluation import Row
from polyfed.errors import DataError, PolyfedError, SettingError, UnknownName, nearest
from polyfed.papers.analyses import PartAnalysis, analyse_part, kinds_by_run, recorded_part
from polyfed.papers.files import UNITS, PaperItem, Part
from polyfed.papers.grid import Cell, Form, PlannedRun, cells_of, planned_runs, settings_of, sources_of
from polyfed.papers.ledger import DIVERGED, FINISHED, Ledger, Record, marks_of, write_record
from polyfed.papers.recording import record_of
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.callbacks.callback import Callback, Callbacks
from polyfed.runs.callbacks.progress import default_callbacks
from polyfed.runs.result import Result, accuracy_table
from polyfed.studies.compare.compare import ComparedRuns

FOLDER = "runs/reproduce"
NO_DATA, NOT_RUN, FAILED, NOT_MEASURED = "no data", "not run", "failed", "not measured"
MADE = " (made)"
"""Suffix of a domain that polyfed generates instead of reading published files."""


@dataclass(frozen=True)
class Trained:
    """The record of a finished run, its folder if it exists, and its differences from the cell's settings."""

    record: Record
    path: str = ""
    marks: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        return self.record.seed

    @property
    def digest(self) -> str:
        return self.record.digest

    @cached_property
    def rows(self) -> list[Row]:
        return self.record.rows()

    @cached_property
    def by_round(self) -> dict[int, list[Row]]:
        return self.record.rows_by_round()

    @property
    def made_with(self) -> dict[str, str]:
        return {**self.record.versions, "machine": self.record.machine, "commit": self.record.commit}


@dataclass(frozen=True)
class Outcome:
    """A cell with our number.

    Attributes:
        cell: The cell.
        values: Our number by seed, in the paper's unit.
        state: Reason why our number is missing; empty if it exists.
        notes: Differences from the paper's setting.
        diverged: Seeds of diverged runs.
    """

    cell: Cell
    values: Mapping[int, float]
    state: str = ""
    notes: tuple[str, ...] = ()
    diverged: tuple[int, ...] = ()

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds (n - 1)."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our number minus the published one; None if our data differs from the paper's."""
        value = self.cell.published.value
        return None if value is None or self.mean is None or self.cell.stands_in else self.mean - value

    def words(self) -> str:
        """Format our number like the paper's."""
        if self.mean is None:
            return self.state
        digits = UNITS[self.cell.part.unit][1]
        lost = f" ({len(self.diverged)} of {len(self.diverged) + len(self.values)} {DIVERGED})" if self.diverged else ""
        return f"{self.mean:.{digits}f}" + (f" ± {self.spread:.{digits}f}" if self.spread is not None else "") + lost


@dataclass
class Reproduction:
    """The result of ``polyfed reproduce``: all cells with published numbers and ours."""

    item: PaperItem
    form: Form
    outcomes: list[Outcome]
    runs: dict[str, PlannedRun]
    trained: dict[str, list[Trained]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    folder: Path = Path(FOLDER)
    analyses: dict[str, PartAnalysis] = field(default_factory=dict)

    @property
    def page(self) -> Path:
        """The Markdown page. The HTML page is in the same folder."""
        return self.folder / f"{self.item.name}{'' if self.form.is_full else f'-{self.form.name}'}.md"

    def parts(self) -> Iterator[tuple[Part, list[Outcome]]]:
        before = 0
        for part in self.item.parts:
            count = len(part.rows) * len(part.columns)
            yield part, self.outcomes[before : before + count]
            before += count

    def as_json(self) -> dict[str, Any]:
        return {
            "experiment": self.item.name,
            "form": self.form.name,
            "cells": [
                {
                    "part": one.cell.part.name,
                    "row": one.cell.row.name,
                    "column": one.cell.column.name,
                    "published": one.cell.published.value,
                    "published_text": one.cell.published.text,
                    "ours": one.mean,
                    "spread": one.spread,
                    "by_seed": {str(seed): value for seed, value in one.values.items()},
                    "difference": one.difference,
                    "state": one.state or "measured",
                    "differs": list(one.notes),
                }
                for one in self.outcomes
            ],
            "analyses": [{"part": name, **one.found.as_json()} for name, one in self.analyses.items() if one.found is not None],
            "problems": self.problems,
            "page": str(self.page),
        }


def reproduce_item(
    item: PaperItem,
    form: Form,
    root: str | Path | None = None,
    out: str | Path = FOLDER,
    callbacks: Sequence[Callback] | None = None,
) -> Reproduction:
    """Train the missing runs of an experiment and compare the results with the published numbers.

    Args:
        item: The experiment.
        form: The selected form.
        root: Data folder.
        out: Folder for runs and pages. Finished runs in it are reused, stopped ones are resumed.
        callbacks: Callbacks of all runs.
    """
    all_callbacks, folder = default_callbacks(callbacks), Path(out)
    message = Callbacks(all_callbacks).message
    if root is not None:
        form = dataclasses.replace(form, changes={**form.changes, "root": str(root)})
    cells = cells_of(item, form)
    found = Reproduction(item, form, [], planned_runs(cells, form), folder=folder)
    without_data = data_problems(found.runs)
    todo = {name: run for name, run in found.runs.items() if name not in without_data}
    total, before = sum(run.seeds for run in todo.values()), 0
    kinds = kinds_by_run(item, cells)
    for name, run in todo.items():
        try:
            place = Callbacks(all_callbacks, run.words, before, total)
            found.trained[name] = _train(run, folder, kinds.get(name, ()), place)
        except PolyfedError as error:
            found.problems[name] = str(error)
            message(f"{run.words} ({run.settings.method}) failed: {error}")
        before += run.seeds
    states = dict.fromkeys(found.problems, FAILED) | dict.fromkeys(without_data, NO_DATA)
    found.problems |= without_data
    _fill_cells(found, cells, states)
    for part in item.parts:  # records contain no feature maps and images, so these figures are drawn from the run folders
        recorded = found.analyses.get(part.name)
        if recorded is not None and recorded.found is not None and not recorded.found.figures:
            own = [cell for cell in cells if cell.part.name == part.name]
            finished = {name: {one.seed: Path(one.path) for one in many} for name, many in found.trained.items()}
            found.analyses[part.name] = analyse_part(part, own, finished, form.changes.get("root"), message)
    return found


def from_ledger(item: PaperItem, form: Form, ledger: Ledger) -> Reproduction:
    """Fill an experiment with the numbers of a ledger, without training or reading data."""
    cells = cells_of(item, form)
    found = Reproduction(item, form, [], planned_runs(cells, form))
    for name, run in found.runs.items():
        if records := ledger.find(run.settings):
            found.trained[name] = [Trained(one, "", marks_of(one, run.settings)) for one in records.values()]
    _fill_cells(found, cells, {})
    return found


def _fill_cells(found: Reproduction, cells: Sequence[Cell], states: Mapping[str, str]) -> None:
    records = {name: {one.seed: one.record for one in many} for name, many in found.trained.items()}
    for part in found.item.parts:
        if part.analysis is not None:
            own = [cell for cell in cells if cell.part.name == part.name]
            found.analyses[part.name] = recorded_part(part, own, records)
    found.outcomes = [_outcome_of(cell, found, states) for cell in cells]


def data_problems(runs: Mapping[str, PlannedRun]) -> dict[str, str]:
    """Return the data problem of each run that cannot be trained on this machine."""
    problems: dict[str, str] = {}
    checked: dict[str, DataSet | str] = {}
    for name, run in runs.items():
        text = run.settings.data
        if text not in checked:
            checked[text] = _find_data(run)
        found = checked[text]
        if isinstance(found, str):
            problems[name] = found
            continue
        try:
            build_federation(found, run.settings)
        except DataError as error:
            problems[name] = str(error)
    return problems


def _find_data(run: PlannedRun) -> DataSet | str:
    try:
        return build_data_set(run.settings.data, run.settings)
    except (DataError, UnknownName) as error:
        return str(error)
    except PolyfedError as error:
        if run.settings.root is not None:
            raise
        return f"--root is missing: {error}"


def _train(run: PlannedRun, folder: Path, kinds: Sequence[str], callback: Callback) -> list[Trained]:
    """Train all seeds of a run, and write a record into each run folder."""

    def read(result: Result) -> Trained:
        settings = dataclasses.replace(run.settings, seed=result.experiment.settings.seed)
        record = record_of(result, settings, kinds)
        write_record(Path(str(result.path)), record)
        return Trained(record, str(result.path))

    place = folder / "runs" / run.folder
    runs = ComparedRuns(run.settings, run.settings.method, seeds=run.seeds, folder=place, callbacks=[callback])
    found = [outcome for _, outcome in runs.train(read)]
    if runs.problems:
        raise PolyfedError(next(iter(runs.problems.values())))
    return found


def _outcome_of(cell: Cell, made: Reproduction, states: Mapping[str, str]) -> Outcome:
    """Compute our number for a cell, or the reason why there is none."""
    if cell.column.minus and not cell.why_not:
        return _difference(cell, made, states)
    form, trained = made.form, made.trained
    if cell.why_not:
        state = cell.why_not.split(":")[0]
        return Outcome(cell, {}, state, (cell.why_not,) if state == "not yet" else ())
    values: list[Mapping[int, float]] = []
    notes: dict[str, None] = dict.fromkeys(cell.notes)
    lost: set[int] = set()
    for source in sources_of(cell, form):
        notes |= dict.fromkeys(source.notes)
        if source.why_not or source.settings is None:
            return Outcome(cell, {}, source.why_not.split(":")[0] or NOT_RUN)
        name = PlannedRun(source.settings, source.seeds, "").folder
        if name not in trained:
            return Outcome(cell, {}, states.get(name, NOT_RUN))
        if source.column.number:
            found, is_made = made.analyses[source.part.name].values(source.column.number, name), False
        else:
            found, is_made = score(source, {one.seed: one.rows for one in trained[name] if one.record.state == FINISHED})
        lost |= {one.seed for one in trained[name] if one.record.state == DIVERGED}
        if not found and lost:
            return Outcome(cell, {}, DIVERGED, tuple(notes), tuple(sorted(lost)))
        if not found:
            return Outcome(cell, {}, NOT_MEASURED if source.column.number else NO_DATA)
        notes |= dict.fromkeys([f"{source.column.read}{MADE}: made by a recipe here, not the published files"] if is_made else [])
        notes |= dict.fromkeys(f"data: {one.record.data}" for one in trained[name] if one.record.data)
        notes |= dict.fromkeys(mark for one in trained[name] for mark in one.marks)
        values.append(found)
    if not values:
        return Outcome(cell, {}, NOT_RUN)
    seeds = set.intersection(*(set(each) for each in values))
    means = {seed: statistics.fmean(each[seed] for each in values) for seed in sorted(seeds)}
    if len(means) != cell.item.seeds:
        notes[f"{len(means)} seed{'s' * (len(means) != 1)} (paper: {cell.item.seeds})"] = None
    return Outcome(cell, means, "", tuple(notes), tuple(sorted(lost - set(means))))


def _difference(cell: Cell, made: Reproduction, states: Mapping[str, str]) -> Outcome:
    """Subtract the number of another row in the same column, seed by seed."""
    other = next((row for row in cell.part.rows if row.name == cell.column.minus), None)
    if other is None:
        names = [row.name for row in cell.part.rows]
        raise SettingError(
            f"{cell.item.name}: cannot subtract the unknown row {cell.column.minus!r}. {nearest(cell.column.minus, names)}"
        )
    own = dataclasses.replace(cell, column=dataclasses.replace(cell.column, minus=""))
    theirs = dataclasses.replace(own, row=other, settings=settings_of(cell.item, cell.part, other, cell.column, made.form))
    high, low = _outcome_of(own, made, states), _outcome_of(theirs, made, states)
    if not high.values or not low.values:
        return Outcome(cell, {}, high.state or low.state)
    both = {seed: value - low.values[seed] for seed, value in high.values.items() if seed in low.values}
    return Outcome(cell, both, "", high.notes, tuple(sorted({*high.diverged, *low.diverged})))


def score(cell: Cell, rows: Mapping[int, Sequence[Row]]) -> tuple[dict[int, float], bool]:
    """Return the score of a cell by seed, empty if the data lacks its domain, and True if polyfed generated this domain."""
    factor = UNITS[cell.part.unit][0]
    found: dict[int, float] = {}
    made = False
    for seed, many in rows.items():
        table = accuracy_table(many, cell.part.score)
        value = _value(table, cell.column.read)
        if value is None:
            value, made = _value(table, cell.column.read + MADE), True
        if value is None:
            return {}, False
        found[seed] = factor * value
    return found, made


def _value(table: Mapping[str, Any], read: str) -> float | None:
    if read == "mean":
        return float(table["mean"])
    if read == "unseen":
        return statistics.fmean(table["unseen"].values()) if table["unseen"] else None
    value = float(table["seen"].get(read, table["unseen"].get(read, math.nan)))
    return None if math.isnan(value) else value
