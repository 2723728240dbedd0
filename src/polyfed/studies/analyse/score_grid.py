"""Compute the score difference between two methods over a grid of two settings (FixBN Figure D)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.errors import SettingError, nearest


@dataclass(frozen=True)
class GridRun:
    """A run of a grid, with its score as a fraction."""

    method: str
    settings: Mapping[str, Any]
    score: float


@dataclass(frozen=True)
class ScoreGrid:
    """Scores of two methods over a grid, by method and row by row. Each cell is a mean over seeds, or None if the runs lack it.

    ``axes`` names the settings along the rows and the columns; the name is empty for an axis with one value.
    """

    methods: tuple[str, str]
    axes: tuple[str, str]
    rows: Sequence[Any]
    columns: Sequence[Any]
    scores: Mapping[str, Sequence[Sequence[float | None]]]

    def differences(self) -> list[list[float | None]]:
        """Return Score(A) - Score(B) for each cell."""
        a, b = (self.scores[method] for method in self.methods)
        return [
            [None if one is None or other is None else one - other for one, other in zip(mine, theirs, strict=True)]
            for mine, theirs in zip(a, b, strict=True)
        ]


def score_grid(runs: Sequence[GridRun], methods: Sequence[str] = (), axes: Sequence[str] = ()) -> ScoreGrid:
    """Arrange runs of two methods on a grid of one or two settings, by default those in which the runs differ."""
    found = list(dict.fromkeys(run.method for run in runs))
    a_b = tuple(methods) or tuple(found)
    for method in methods:
        if method not in found:
            raise SettingError(f"None of the runs uses {method!r}. {nearest(method, found)}")
    if len(a_b) != 2:
        raise SettingError(f"A grid compares two methods; got {len(a_b)}: {', '.join(a_b)}. Pass runs of two methods.")
    names = sorted({name for run in runs for name in run.settings})
    differing = [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]
    chosen = list(axes) or differing
    if not 1 <= len(chosen) <= 2:
        problem = f"the runs differ in {', '.join(chosen)}" if chosen else "all runs have the same settings"
        raise SettingError(
            f"A grid has one or two axes, but {problem}. Pass runs that differ in one or two settings (--sweep, partitions, steps)."
        )
    row, column = chosen if len(chosen) == 2 else ("", chosen[0])
    rows, columns = (_values(runs, name) for name in (row, column))
    scores = {method: [[_cell(runs, method, {row: r, column: c}) for c in columns] for r in rows] for method in a_b}
    return ScoreGrid((a_b[0], a_b[1]), (row, column), rows, columns, scores)


def _values(runs: Sequence[GridRun], name: str) -> list[Any]:
    if not name:
        return [""]
    values = list({repr(run.settings.get(name)): run.settings.get(name) for run in runs}.values())
    numbers = all(isinstance(value, int | float) for value in values)
    return sorted(values) if numbers else values


def _cell(runs: Sequence[GridRun], method: str, where: Mapping[str, Any]) -> float | None:
    wanted = {name: value for name, value in where.items() if name}
    found = [run.score for run in runs if run.method == method and all(run.settings.get(n) == v for n, v in wanted.items())]
    return statistics.fmean(found) if found else None
