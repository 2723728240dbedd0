"""Reproduced figures in the form of the paper's: curves over rounds, lines over a value, bars, heat maps and analyses."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from polyfed.errors import SettingError, nearest
from polyfed.papers.files import UNITS, Part, PartFigures
from polyfed.papers.grid import PlannedRun
from polyfed.papers.reproduction import Outcome, Reproduction, score
from polyfed.runs.figures import as_image
from polyfed.studies.report.charts import COLOURS, Bar, Series, bars, heat_map, line_chart, swatch, ticks

CURVES, LINES, BARS, HEAT_MAP, ANALYSIS = KINDS = ("curves", "lines", "bars", "heat map", "analysis")
DOTS_PER_INCH = 110
_PALETTE = ("#0072b2", "#d55e00", "#00855f", "#b4518d", "#8a6d00", "#3a9bd9", "#3d3d3d", "#8c3b2e")
STYLE = (
    "text{fill:#5b6570;font:11px system-ui,sans-serif}.label{fill:#1c2024}.grid{stroke:#dde1e6;fill:none}.axis{stroke:#5b6570;fill:none}"
    ".line{fill:none;stroke:var(--c);stroke-width:2}.band{fill:var(--c);opacity:.16}.mark,.fill{fill:var(--c);stroke:var(--c)}"
    ".whisker{stroke:#1c2024;fill:none}" + "".join(f".s{number}{{--c:{colour}}}" for number, colour in enumerate(_PALETTE))
)


_Chart = tuple[str, Markup, list[tuple[str, Markup]]]
"""Title, SVG and legend."""


@dataclass(frozen=True)
class Picture:
    """A figure, embedded in the HTML page and stored as a file for the Markdown page."""

    title: str
    html: Markup
    file: bytes
    suffix: str
    legend: Sequence[tuple[str, Markup]] = ()


def pictures(found: Reproduction, only: Part | None = None) -> Iterator[Picture]:
    """Yield all figures with data, optionally those of one part."""
    for part, outcomes in found.parts():
        if only is not None and part is not only:
            continue
        if part.analysis is not None:
            yield from _analysis_figures(found, part, part.analysis)
            continue
        for title, svg, legend in _charts(found, part, outcomes):
            yield Picture(title, svg, standalone(svg).encode(), ".svg", legend)


def _charts(found: Reproduction, part: Part, outcomes: Sequence[Outcome]) -> Iterator[_Chart]:
    kind = found.item.figure
    if kind == CURVES:
        yield from _curves(found, part, outcomes)
    elif kind == LINES:
        yield from _lines(found, part, outcomes)
    elif kind == BARS:
        yield from _bars(part, outcomes)
    elif kind == HEAT_MAP:
        yield from _heat_map(part, outcomes)


def _analysis_figures(found: Reproduction, part: Part, wanted: PartFigures) -> Iterator[Picture]:
    """Yield the figures of a part's analysis that the experiment file lists."""
    analysis = found.analyses[part.name].found
    if analysis is None or not analysis.figures:
        return
    for name in wanted.figures:
        if name not in analysis.figures:
            raise SettingError(f"{found.item.name}: {wanted.kind} has no figure {name!r}. {nearest(name, list(analysis.figures))}")
        file = io.BytesIO()
        analysis.figures[name].savefig(file, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
        title = ", ".join(filter(None, (part.name, analysis.title, name)))
        yield Picture(title, Markup(as_image(analysis.figures[name], DOTS_PER_INCH, title)), file.getvalue(), ".png")


def standalone(svg: Markup) -> str:
    return (
        str(svg)
        .replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background:#fff" ', 1)
        .replace("><title>", f"><style>{STYLE}</style><title>", 1)
    )


def _title(part: Part, column: str = "") -> str:
    return ", ".join(filter(None, (part.name, column)))


def _curves(found: Reproduction, part: Part, outcomes: Sequence[Outcome]) -> Iterator[_Chart]:
    """Plot scores over rounds, with one chart per column."""
    for place, column in enumerate(part.columns):
        series = []
        for style, row in enumerate(part.rows):
            cell = outcomes[style * len(part.columns) + place].cell
            trained = [] if cell.settings is None else found.trained.get(PlannedRun(cell.settings, cell.seeds, "").folder, [])
            rounds = sorted(set.intersection(*(set(one.by_round) for one in trained))) if trained else []
            points = []
            for number in rounds:
                values = score(cell, {one.seed: one.by_round[number] for one in trained})[0].values()
                points += [(float(number), statistics.fmean(values))] if values else []
            series.append(Series(row.name, style, points))
        yield from _chart(part, column.name, series, "round")


def _lines(found: Reproduction, part: Part, outcomes: Sequence[Outcome]) -> Iterator[_Chart]:
    """Plot scores over the columns, with one line per row."""
    width = len(part.columns)
    series = []
    for style, row in enumerate(part.rows):
        cells = outcomes[style * width : (style + 1) * width]
        xs = [number if one.cell.column.x is None else one.cell.column.x for number, one in enumerate(cells, 1)]
        series.append(Series(row.name, style, [(x, one.mean) for x, one in zip(xs, cells, strict=True) if one.mean is not None]))
    yield from _chart(part, "", series, found.item.x or "column")


def _chart(part: Part, column: str, series: Sequence[Series], x: str) -> Iterator[_Chart]:
    points = [point for one in series for point in one.points]
    if points:
        xs, ys = [place for place, _ in points], [value for _, value in points]
        title = _title(part, column)
        digits = UNITS[part.unit][1] - 1
        svg = line_chart(
            series, title or x, ticks(min(ys), max(ys)), lambda value: f"{value:.{digits}f}", (x, part.unit), (min(xs), max(xs))
        )
        yield title, svg, [(row.name, swatch(style)) for style, row in enumerate(part.rows)]


def _bars(part: Part, outcomes: Sequence[Outcome]) -> Iterator[_Chart]:
    """Plot one bar per row, with one chart per column."""
    width = len(part.columns)
    for place, column in enumerate(part.columns):
        rows = []
        for style, row in enumerate(part.rows):
            one = outcomes[style * width + place]
            if one.mean is not None:
                colour = f"s{style % COLOURS}"
                rows.append(Bar(row.name, [(one.mean, colour, f"{row.name}: {one.words()}")], one.words(), one.spread or 0.0))
        if rows:
            end = max(bar.segments[0][0] for bar in rows)
            title = _title(part, column.name)
            yield title, bars(rows, title, end, lambda value: f"{value:g}"), []


def _heat_map(part: Part, outcomes: Sequence[Outcome]) -> Iterator[_Chart]:
    width = len(part.columns)
    values = [[one.mean for one in outcomes[number * width : (number + 1) * width]] for number in range(len(part.rows))]
    if any(value is not None for line in values for value in line):
        names = [row.name for row in part.rows], [column.name for column in part.columns]
        yield _title(part), heat_map(values, *names, _title(part)), []
