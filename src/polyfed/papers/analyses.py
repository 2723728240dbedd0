"""Analyses of trained models for the figures of an experiment, computed from run folders or from ledger records.

Records contain the plotted values, so that the same figures can be drawn from them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from polyfed.errors import PolyfedError, RunFolderError, SettingError, nearest
from polyfed.papers.files import PaperItem, Part
from polyfed.papers.grid import Cell, folder_of
from polyfed.papers.ledger import Record
from polyfed.runs.result import Result
from polyfed.studies.analyse import drawings
from polyfed.studies.analyse.analyse import analyse_runs
from polyfed.studies.analyse.confidence import Confidence
from polyfed.studies.analyse.gradient_bias import GradientBias
from polyfed.studies.analyse.kinds import KINDS, Analysis
from polyfed.studies.analyse.local_models import EntrySpread
from polyfed.studies.analyse.norm_statistics import NormStatistics, Statistics
from polyfed.studies.analyse.opened_run import OpenedRun
from polyfed.studies.analyse.presentations import Rows
from polyfed.studies.analyse.rounds import Drift, Noted
from polyfed.studies.analyse.score_grid import GridRun

_NORM_STATISTICS = "norm-statistics"
_DRAWN_CHANNELS = 64
"""Number of channels per layer in a figure (``drawings.channel_curves``)."""
DIGITS = 4
_OF_DISTANCE = ("source", "layer", "one", "other", "shift")
_TYPES = {each.__name__: each for each in (Confidence, GradientBias, EntrySpread, Drift, Noted, GridRun)}
"""Measured values that a record can store. Feature maps and t-SNE show images, so records contain only their numbers."""
TYPE, PAIRS = "type", "pairs"

Finished = Mapping[str, Mapping[int, Path]]
"""Run folders by the name of the planned run and by seed."""


@dataclass(frozen=True)
class PartAnalysis:
    """The analysis of a part.

    Attributes:
        found: The analysis; None if it applies to none of the runs.
        labels: Label of each run, by the name of the planned run and the seed.
        skipped: One message for each run to which it does not apply.
    """

    found: Analysis | None = None
    labels: Mapping[tuple[str, int], str] = field(default_factory=dict)
    skipped: Sequence[str] = ()

    def values(self, name: str, folder: str) -> dict[int, float]:
        """Return one measured number of a planned run by seed; empty if it was not measured."""
        if self.found is None:
            return {}
        if name not in self.found.numbers:
            raise SettingError(f"The analysis {self.found.kind} has no number {name!r}. {nearest(name, list(self.found.numbers))}")
        by_label = self.found.numbers[name]
        return {seed: by_label[label] for (its, seed), label in self.labels.items() if its == folder and label in by_label}


def kinds_by_run(item: PaperItem, cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of analyses that each run needs, by the name of the planned run."""
    found: dict[str, dict[str, None]] = {}
    for part in item.parts:
        for cell in cells:
            if part.analysis is not None and cell.part.name == part.name and cell.settings is not None:
                found.setdefault(folder_of(cell.settings), {})[part.analysis.kind] = None
    return {folder: tuple(kinds) for folder, kinds in found.items()}


def recorded_part(part: Part, cells: Sequence[Cell], records: Mapping[str, Mapping[int, Record]]) -> PartAnalysis:
    labels = run_labels(cells, records)
    if part.analysis is None or not labels:
        return PartAnalysis()
    kind = part.analysis.kind
    runs = {label: records[folder][seed].analyses.get(kind) for (folder, seed), label in labels.items()}
    found, skipped = present(kind, {label: one for label, one in runs.items() if one is not None})
    return PartAnalysis(found, labels, skipped)


def run_labels(cells: Sequence[Cell], finished: Mapping[str, Mapping[int, object]]) -> dict[tuple[str, int], str]:
    """Label each finished run of a part by its row, and by its column and seed if the row has several columns and seeds."""
    first: dict[str, Cell] = {}
    for cell in cells:
        if cell.settings is not None:
            first.setdefault(folder_of(cell.settings), cell)
    runs_of_row = Counter(cell.row.name for cell in first.values())
    labels: dict[tuple[str, int], str] = {}
    for folder, cell in first.items():
        label = cell.row.name if runs_of_row[cell.row.name] == 1 else f"{cell.row.name}, {cell.column.name}"
        seeds = finished.get(folder, {})
        labels |= {(folder, seed): label if len(seeds) == 1 else f"{label}, seed {seed}" for seed in seeds}
    return labels


def analyse_part(
    part: Part, cells: Sequence[Cell], finished: Finished, root: str | None, notify: Callable[[str], None]
) -> PartAnalysis:
    """Run the analysis of a part on its finished runs.

    Args:
        part: The part.
        cells: Its cells.
        finished: Run folders.
        root: Data folder.
        notify: Receives a message for each damaged file.
    """
    labels = run_labels(cells, finished)
    if part.analysis is None or not labels:
        return PartAnalysis()
    runs = {label: finished[folder][seed] for (folder, seed), label in labels.items()}
    analyses = analyse_runs(runs, [part.analysis.kind], {} if root is None else {"root": root}, notify)
    return PartAnalysis(next(iter(analyses), None), labels, [f"{one.run}: {one.reason}" for one in analyses.skipped])


def record_analysis(result: Result, kind: str) -> dict[str, Any]:
    """Return title, finding, numbers and plotted values of the analysis of one run, or the reason why it does not apply."""
    opened = OpenedRun(result, "run")
    try:
        measured = KINDS[kind].measure(opened)
        found = KINDS[kind].present(kind, {"run": measured})
    except PolyfedError as error:
        return {"reason": str(error)}
    numbers = {name: float(f"{by_run['run']:.7g}") for name, by_run in found.numbers.items()}
    return {"title": found.title, "sentence": found.sentence, "numbers": numbers, "drawn": _plotted_values(kind, found, measured)}


def _plotted_values(kind: str, found: Analysis, measured: Any) -> Any:
    if kind == _NORM_STATISTICS:
        return _statistics_as_plain(found, measured)
    try:
        return as_plain(measured)
    except TypeError:  # it contains images or feature maps
        return None


def _statistics_as_plain(found: Analysis, measured: tuple[NormStatistics, NormStatistics]) -> dict[str, Any]:
    distances = [[_short(row[name]) for name in _OF_DISTANCE] for row in found.tables["distances"]]
    channels = {
        owner: {
            layer: [[_short(float(v)) for v in values[:_DRAWN_CHANNELS]] for values in (each.mean, each.variance)]
            for layer, each in layers.items()
        }
        for owner, layers in measured[1].by_owner.items()
    }
    return {"distances": distances, "channels": channels}


def present(kind: str, by_label: Mapping[str, Mapping[str, Any]]) -> tuple[Analysis | None, list[str]]:
    """Return the analysis of recorded runs with its figures, and a message for each run to which it does not apply."""
    skipped = [f"{label}: {one['reason']}" for label, one in by_label.items() if "reason" in one]
    found = {label: one for label, one in by_label.items() if "reason" not in one}
    if not found:
        return None, skipped
    first = next(iter(found.values()))
    numbers = {name: {label: float(one["numbers"][name]) for label, one in found.items()} for name in first["numbers"]}
    sentences = [str(one["sentence"]) for one in found.values()]
    sentence = (
        sentences[0]
        if len(found) == 1
        else " ".join(f"{label}: {text[0].lower()}{text[1:]}" for label, text in zip(found, sentences, strict=True))
    )
    tables, figures = _tables_and_figures(kind, found)
    return Analysis(kind, str(first["title"]), sentence, tables, figures, numbers), skipped


def _tables_and_figures(kind: str, found: Mapping[str, Mapping[str, Any]]) -> tuple[Mapping[str, Rows], Mapping[str, Any]]:
    """Return the tables and figures that records permit; empty for feature maps and t-SNE."""
    if kind == _NORM_STATISTICS:
        return _statistics_figures(found)
    drawn = {label: _from_plain(one["drawn"]) for label, one in found.items() if one.get("drawn") is not None}
    if not drawn:
        return {}, {}
    again = KINDS[kind].present(kind, drawn)
    return again.tables, again.figures


def _statistics_figures(found: Mapping[str, Mapping[str, Any]]) -> tuple[Mapping[str, Rows], Mapping[str, Any]]:
    distances = [
        {"run": label, **dict(zip(_OF_DISTANCE, row, strict=True))}
        for label, one in found.items()
        for row in one["drawn"]["distances"]
    ]
    label, one = next(iter(found.items()))
    statistics = NormStatistics(
        "trained",
        {
            owner: {layer: Statistics(torch.tensor(mean), torch.tensor(variance)) for layer, (mean, variance) in layers.items()}
            for owner, layers in one["drawn"]["channels"].items()
        },
    )
    figures = {
        "distance": drawings.distance_lines(distances),
        "channels": drawings.channel_curves(statistics, label, statistics.layers[-2:]),
        "channels of all layers": drawings.channel_curves(statistics, label, statistics.layers),
    }
    return {"distances": distances}, figures


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def as_plain(value: Any) -> Any:
    """Convert measured values to JSON, and mappings with keys that are not text to pairs.

    Raises:
        TypeError: For types other than ``_TYPES``.
    """
    if type(value).__name__ in _TYPES and isinstance(value, _TYPES[type(value).__name__]):
        fields = {item.name: as_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {TYPE: type(value).__name__, **fields}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: as_plain(each) for key, each in value.items()}
        return {TYPE: PAIRS, PAIRS: [[key, as_plain(each)] for key, each in value.items()]}
    if isinstance(value, str | bool | int | float | None):
        return _short(value)
    if isinstance(value, Sequence):
        return [as_plain(each) for each in value]
    raise TypeError(f"A record cannot contain {type(value).__name__}.")


def _from_plain(value: Any) -> Any:
    """Invert ``as_plain``, with lists instead of tuples."""
    if isinstance(value, list):
        return [_from_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TYPE)
    if kind == PAIRS:
        return {key: _from_plain(each) for key, each in value[PAIRS]}
    if kind is None:
        return {key: _from_plain(each) for key, each in value.items()}
    if kind not in _TYPES:
        raise RunFolderError(f"A record contains values of the unknown type {kind!r}. Restore the file from a backup.")
    return _TYPES[kind](**{key: _from_plain(each) for key, each in value.items() if key != TYPE})
