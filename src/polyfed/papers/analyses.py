"""Figures that look into trained models: the analysis that a part of an experiment names, on the part's finished runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyfed.errors import SettingError, nearest
from polyfed.papers.files import PaperItem, Part
from polyfed.papers.grid import Cell, folder_of
from polyfed.papers.ledger import Record
from polyfed.papers.recorded_analyses import presented
from polyfed.studies.analyse.analyse import analyse_runs
from polyfed.studies.analyse.kinds import Analysis

Finished = Mapping[str, Mapping[int, Path]]
"""Run folders by the name of their planned runs, and by seed."""


@dataclass(frozen=True)
class PartAnalysis:
    """What came of a part's analysis.

    Attributes:
        found: the analysis; None where it applies to none of the runs.
        labels: what each run is called in it, by the name of its planned runs and its seed.
        skipped: why it does not apply to a run, a sentence each.
    """

    found: Analysis | None = None
    labels: Mapping[tuple[str, int], str] = field(default_factory=dict)
    skipped: Sequence[str] = ()

    def values(self, name: str, folder: str) -> dict[int, float]:
        """One of its numbers for all seeds of a planned run; nothing where it was not measured."""
        if self.found is None:
            return {}
        if name not in self.found.numbers:
            raise SettingError(f"The analysis {self.found.kind} has no number {name!r}. {nearest(name, list(self.found.numbers))}")
        by_label = self.found.numbers[name]
        return {seed: by_label[label] for (its, seed), label in self.labels.items() if its == folder and label in by_label}


def kinds_by_run(item: PaperItem, cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """The kinds of analyses that each run of an experiment needs, by the name of its planned runs."""
    found: dict[str, dict[str, None]] = {}
    for part in item.parts:
        for cell in cells:
            if part.analysis is not None and cell.part.name == part.name and cell.settings is not None:
                found.setdefault(folder_of(cell.settings), {})[part.analysis.kind] = None
    return {folder: tuple(kinds) for folder, kinds in found.items()}


def recorded_part(part: Part, cells: Sequence[Cell], records: Mapping[str, Mapping[int, Record]]) -> PartAnalysis:
    """The analysis that a part names, from the records of its runs."""
    labels = labelled(cells, records)
    if part.analysis is None or not labels:
        return PartAnalysis()
    kind = part.analysis.kind
    runs = {label: records[folder][seed].analyses.get(kind) for (folder, seed), label in labels.items()}
    found, skipped = presented(kind, {label: one for label, one in runs.items() if one is not None})
    return PartAnalysis(found, labels, skipped)


def labelled(cells: Sequence[Cell], finished: Mapping[str, Mapping[int, object]]) -> dict[tuple[str, int], str]:
    """A label for each finished run of a part: its row; with its column where a row has several runs; with its seed where there are several."""
    first: dict[str, Cell] = {}
    for cell in cells:
        if cell.settings is not None:
            first.setdefault(folder_of(cell.settings), cell)
    runs_of_row = Counter(cell.row.name for cell in first.values())
    labels: dict[tuple[str, int], str] = {}
    for folder, cell in first.items():
        words = cell.row.name if runs_of_row[cell.row.name] == 1 else f"{cell.row.name}, {cell.column.name}"
        seeds = finished.get(folder, {})
        labels |= {(folder, seed): words if len(seeds) == 1 else f"{words}, seed {seed}" for seed in seeds}
    return labels


def analyse_part(
    part: Part, cells: Sequence[Cell], finished: Finished, root: str | None, notify: Callable[[str], None]
) -> PartAnalysis:
    """The analysis that a part names, on those of its runs that have ended.

    Args:
        part: names an analysis.
        cells: its cells.
        finished: run folders.
        root: the folder of the data sets' files.
        notify: called with a sentence for each damaged file.
    """
    labels = labelled(cells, finished)
    if part.analysis is None or not labels:
        return PartAnalysis()
    runs = {label: finished[folder][seed] for (folder, seed), label in labels.items()}
    made = analyse_runs(runs, [part.analysis.kind], {} if root is None else {"root": root}, notify)
    return PartAnalysis(next(iter(made), None), labels, [f"{one.run}: {one.reason}" for one in made.skipped])
