"""Small matplotlib figures of scores for notebooks and papers."""

from __future__ import annotations

import base64
import functools
import io
import math
from collections.abc import Sequence
from html import escape
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#00855f", "#b4518d", "#8a6d00", "#3a9bd9", "#3d3d3d", "#8c3b2e")
MARKERS = "osD^vPX*"
Dots = Sequence[tuple[float, float] | None]
"""A value with its error for each column, or None."""


@functools.cache
def _notebook_figure() -> Any:
    """Return the figure class. It is created on first use, because matplotlib is slow to import."""
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """A figure that a notebook cell displays without pyplot or a magic command."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=90)
            return file.getvalue()

    return NotebookFigure


def empty_figure(width: float, height: float) -> Any:
    return _notebook_figure()(figsize=(width, height), layout="constrained")


def dots_figure(columns: Sequence[str], rows: Sequence[tuple[str, Dots]], measure: str, baseline: Sequence[float] = ()) -> Any:
    """Draw a dot with an error bar for each row and column, in percent.

    Args:
        columns: Names on the horizontal axis.
        rows: A label, and a value with its error for each column, as fractions.
        measure: Name of the vertical axis.
        baseline: Score of the most frequent class in each column, drawn as a short line.
    """
    figure = empty_figure(max(3.6, 0.9 * len(columns) + 1.6), 3.0)
    axes = figure.add_subplot()
    for position, (label, dots) in enumerate(rows):
        offset = (position - (len(rows) - 1) / 2) * 0.7 / max(len(rows), 1)
        named = False
        for column, dot in enumerate(dots):
            if dot is None or math.isnan(dot[0]):
                continue
            value, error = dot
            axes.errorbar(
                column + offset,
                100 * value,
                yerr=None if math.isnan(error) else 100 * error,
                fmt=MARKERS[position % len(MARKERS)],
                color=COLOURS[position % len(COLOURS)],
                markersize=4,
                linewidth=1,
                label=None if named else label,
            )
            named = True
    for column, value in enumerate(baseline):
        if not math.isnan(value):
            name = "most frequent class" if column == 0 else None
            axes.hlines(100 * value, column - 0.4, column + 0.4, colors="0.6", linestyles="dotted", linewidth=1, label=name)
    axes.set_xticks(range(len(columns)), columns, rotation=20 if len(columns) > 4 else 0)
    axes.set_ylabel(f"{measure}, %")
    axes.grid(axis="y", linewidth=0.4)
    figure.legend(loc="outside upper left", fontsize=7, ncols=2)
    return figure


def as_image(figure: Any, dots_per_inch: int = 90, words: str = "scores by domain") -> str:
    """Return a figure as an ``<img>`` with embedded data; ``words`` is its alternative text."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dots_per_inch)
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
