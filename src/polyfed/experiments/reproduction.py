"""An experiment reproduced: what is missing is trained, what is there is read, and every cell gets our number beside the published one."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.evaluation import Row
from polyfed.errors import DataError, PolyfedError, UnknownName
from polyfed.experiments.files import UNITS, PaperItem
from polyfed.experiments.grid import Cell, Form, PlannedRun, cells_of, planned_runs, sources_of
from polyfed.runs.assemble import build_data_set
from polyfed.runs.compare import ComparedRuns
from polyfed.runs.notebook_bar import default_watcher
from polyfed.runs.result import Result, accuracy_table
from polyfed.runs.run_folder import RunFolder
from polyfed.runs.watcher import Watcher

if TYPE_CHECKING:
    from polyfed.core.server import Server

FOLDER = "runs/reproduce"
NO_DATA, NOT_RUN, FAILED = "no data", "not run", "failed"
MADE = " (made)"
"""Ends the name of a domain that is made by a recipe here, in the place of published files."""


@dataclass(frozen=True)
class Trained:
    """What a finished run scored: its rows, those of every scored round, and where it is."""

    seed: int
    rows: Sequence[Row]
    by_round: Mapping[int, Sequence[Row]]
    digest: str
    path: str
    made_with: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """A cell with our number.

    Attributes:
        cell: the cell.
        values: our number by seed, in the paper's unit.
        state: why there is no number; empty where there is one.
        notes: how the setting differs from the paper's.
    """

    cell: Cell
    values: Mapping[int, float]
    state: str = ""
    notes: tuple[str, ...] = ()

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds (n - 1)."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours minus the published number."""
        value = self.cell.published.value
        return None if value is None or self.mean is None else self.mean - value

    def words(self) -> str:
        """Ours, as the paper would write it."""
        if self.mean is None:
            return self.state
        digits = UNITS[self.cell.part.unit][1]
        return f"{self.mean:.{digits}f}" + (f" ± {self.spread:.{digits}f}" if self.spread is not None else "")


@dataclass
class Reproduction:
    """The outcome of ``polyfed reproduce``: every cell, ours and theirs."""

    item: PaperItem
    form: Form
    outcomes: list[Outcome]
    runs: dict[str, PlannedRun]
    trained: dict[str, list[Trained]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    folder: Path = Path(FOLDER)

    @property
    def page(self) -> Path:
        """The page in Markdown; the one in HTML lies beside it."""
        return self.folder / f"{self.item.name}{'-reduced' if self.form.reduced else ''}.md"

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON."""
        return {
            "experiment": self.item.name,
            "form": "reduced" if self.form.reduced else "full",
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
            "problems": self.problems,
            "page": str(self.page),
        }


def reproduce_item(
    item: PaperItem,
    form: Form,
    root: str | Path | None = None,
    out: str | Path = FOLDER,
    watcher: Watcher | None = None,
) -> Reproduction:
    """Train what is missing and compare.

    Args:
        item: the experiment.
        form: what is asked for of it.
        root: the folder of the data sets' files.
        out: where run folders and pages go; runs in it are reused, stopped ones resumed.
        watcher: hears of every run.
    """
    heard, folder = watcher or default_watcher(), Path(out)
    if root is not None:
        form = dataclasses.replace(form, changes={**form.changes, "root": str(root)})
    cells = cells_of(item, form)
    made = Reproduction(item, form, [], planned_runs(cells, form), folder=folder)
    without_data = data_problems(made.runs)
    todo = {name: run for name, run in made.runs.items() if run.settings.data not in without_data}
    total, before = sum(run.seeds for run in todo.values()), 0
    for name, run in todo.items():
        try:
            made.trained[name] = _train(run, folder / "runs" / name, _Offset(heard, run.words, before, total))
        except PolyfedError as error:
            made.problems[name] = str(error)
            heard.notice(f"{run.words} ({run.settings.method}) is given up: {error}")
        before += run.seeds
    states = {name: NO_DATA for name, run in made.runs.items() if run.settings.data in without_data}
    states |= dict.fromkeys(made.problems, FAILED)
    made.problems |= {name: without_data[made.runs[name].settings.data] for name, state in states.items() if state == NO_DATA}
    made.outcomes = [outcome_of(cell, form, made.trained, states) for cell in cells]
    return made


def data_problems(runs: Mapping[str, PlannedRun]) -> dict[str, str]:
    """Data that are not on this machine, and what was looked for."""
    problems: dict[str, str] = {}
    for run in {run.settings.data: run for run in runs.values()}.values():
        try:
            build_data_set(run.settings.data, run.settings)
        except (DataError, UnknownName) as error:
            problems[run.settings.data] = str(error)
        except PolyfedError as error:
            if run.settings.root is not None:
                raise
            problems[run.settings.data] = f"No --root was given: {error}"
    return problems


class _Offset(Watcher):
    """Passes on what it hears of a few runs, as some of all runs."""

    def __init__(self, heard: Watcher, words: str, before: int, total: int) -> None:
        self.heard, self.words, self.before, self.total = heard, words, before, total

    def begin(self, words: str, number: int, total: int) -> None:
        self.heard.begin(f"{self.words}: {words}", self.before + number, self.total)

    def round(self, server: Server) -> None:
        self.heard.round(server)

    def end(self, words: str, outcome: str) -> None:
        self.heard.end(f"{self.words}: {words}", outcome)

    def notice(self, text: str) -> None:
        self.heard.notice(text)


def _train(run: PlannedRun, folder: Path, watcher: Watcher) -> list[Trained]:
    runs = ComparedRuns(run.settings, run.settings.method, seeds=run.seeds, folder=folder, watcher=watcher)
    found = [outcome for _, outcome in runs.train(_read)]
    if runs.problems:
        raise PolyfedError(next(iter(runs.problems.values())))
    return found


def _read(result: Result) -> Trained:
    """What is needed of a finished run, so that its models need not stay in memory."""
    path = str(result.path)
    folder = RunFolder(path)
    by_round: dict[int, list[Row]] = {}
    for line in folder.metrics():
        if line["view"] in ("seen", "unseen") and "count" in line:
            by_round.setdefault(int(line["round"]), []).append(Row(line["view"], line["client"], line["domain"], line))
    made_with = folder.document().get("made_with", {})
    return Trained(result.experiment.settings.seed, result.rows, by_round, result.digest, path, made_with)


def outcome_of(cell: Cell, form: Form, trained: Mapping[str, Sequence[Trained]], states: Mapping[str, str]) -> Outcome:
    """A cell with our number, or why there is none."""
    if cell.why_not:
        state = cell.why_not.split(":")[0]
        return Outcome(cell, {}, state, (cell.why_not,) if state == "not yet" else ())
    values: list[Mapping[int, float]] = []
    notes: dict[str, None] = dict.fromkeys(cell.notes)
    for source in sources_of(cell, form):
        notes |= dict.fromkeys(source.notes)
        if source.why_not or source.settings is None:
            return Outcome(cell, {}, source.why_not.split(":")[0] or NOT_RUN)
        name = PlannedRun(source.settings, source.seeds, "").folder
        if name not in trained:
            return Outcome(cell, {}, states.get(name, NOT_RUN))
        found, made = score(source, {one.seed: one.rows for one in trained[name]})
        if not found:
            return Outcome(cell, {}, NO_DATA)
        notes |= dict.fromkeys([f"{source.column.read}{MADE}: made by a recipe here, not the published files"] if made else [])
        values.append(found)
    if not values:
        return Outcome(cell, {}, NOT_RUN)
    seeds = set.intersection(*(set(each) for each in values))
    means = {seed: statistics.fmean(each[seed] for each in values) for seed in sorted(seeds)}
    if len(means) != cell.item.seeds:
        notes[f"{len(means)} seed{'s' * (len(means) != 1)} (paper: {cell.item.seeds})"] = None
    return Outcome(cell, means, "", tuple(notes))


def score(cell: Cell, rows: Mapping[int, Sequence[Row]]) -> tuple[dict[int, float], bool]:
    """What a cell reads, by seed, and whether the domain is a made one; nothing where the data lack the domain."""
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
