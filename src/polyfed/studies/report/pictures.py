"""The pictures of the report: which lines, bars and dots are drawn from a set of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyfed.core.metrics import MEASURES
from polyfed.studies.report.charts import COLOURS, Bar, Dot, Series, bars, confusion_map, dot_rows, line_chart, scatter, ticks
from polyfed.studies.report.run_record import MEAN, average, deviation
from polyfed.studies.report.run_set import MethodRow, RunSet
from polyfed.studies.report.sections import KINDS, kind_words
from polyfed.studies.report.words import byte_words, capital, percent, points

MOST_CLIENTS = 16
MOST_CLASSES_DRAWN = 40


def _kind_class(kind: str) -> str:
    """The colour class of an entry kind."""
    return f"k{list(KINDS).index(kind) if kind in KINDS else len(KINDS)}"


def _as_percent(value: float) -> str:
    return f"{100 * value:.3g}"


def _byte_tick(count: float) -> str:
    """Bytes at an axis: as ``byte_words``, without trailing zeros."""
    number, unit = byte_words(count).split()
    return f"{float(number):g} {unit}"


def _series(row: MethodRow, style: int, by_round: Mapping[int, Sequence[float]]) -> Series:
    """A line through the means over seeds, with a band of one standard deviation either side."""
    middle = [(number, average(values)) for number, values in by_round.items()]
    wide = {number: deviation(values) for number, values in by_round.items()}
    band = [(number, mean - wide[number], mean + wide[number]) for number, mean in middle if not math.isnan(wide[number])]
    return Series(row.method, style, middle, band)


def curves(runs: RunSet, view: str, styles: Mapping[str, int]) -> dict[str, Any] | None:
    """A chart for the mean and for each domain: curves, or dots if only one round was evaluated."""
    domains = runs.domains(view)
    if not domains:
        return None
    names: dict[Any, str] = {**({MEAN: "Mean over domains"} if len(domains) > 1 else {}), **{domain: domain for domain in domains}}
    found = {"view": view, "several_seeds": any(len(row.seeds) > 1 for row in runs.rows)}
    if all(len(row.rounds(view)) <= 1 for row in runs.rows):
        charts = [{"title": name, "svg": _score_dots(runs, view, key, name, styles)} for key, name in names.items()]
        return {**found, "charts": charts, "only_last": True}
    lines = {key: [_accuracy_series(row, view, key, styles[row.method]) for row in runs.rows] for key in names}
    words = MEASURES[runs.measure]
    every = [one for many in lines.values() for one in many]
    y_ticks, span, labels = ticks(*_reach(every)), _span(every), ("round", f"{words}, %")
    charts = [
        {
            "title": names[key],
            "svg": line_chart(many, f"{capital(words)} over rounds, {names[key]}", y_ticks, _as_percent, labels, span),
        }
        for key, many in lines.items()
    ]
    return {**found, "charts": charts, "only_last": False, "from": _as_percent(y_ticks[0])}


def _accuracy_series(row: MethodRow, view: str, key: Any, style: int) -> Series:
    found = {number: list(row.scores(view, key, number).values()) for number in row.rounds(view)}
    return _series(row, style, {number: values for number, values in found.items() if values})


def _reach(series: Sequence[Series]) -> tuple[float, float]:
    values = [value for one in series for _, value in one.points]
    return min(values, default=0.0), max(values, default=1.0)


def _span(series: Sequence[Series]) -> tuple[float, float]:
    rounds = [number for one in series for number, _ in one.points]
    return min(rounds, default=0.0), max(rounds, default=1.0)


def _score_dots(runs: RunSet, view: str, key: Any, name: str, styles: Mapping[str, int]) -> str:
    """Last scores of all methods; whiskers are one standard deviation over seeds, else the error from the test set's size."""
    rows = []
    for row in runs.rows:
        number = row.number(view, key) if row.finals(view, key) else None
        if number is not None:
            error = 0.0 if math.isnan(number.error) else number.error
            note = f"{percent(number.value)} %" + (f" ± {points(error)}" if error else "")
            rows.append(Bar(row.method, [(number.value, f"s{styles[row.method] % COLOURS}", f"{row.method}: {note}")], note, error))
    rows.sort(key=lambda bar: -bar.segments[0][0])
    return dot_rows(rows, f"{capital(MEASURES[runs.measure])}, {name}", _as_percent)


def loss_charts(runs: RunSet, styles: Mapping[str, int]) -> dict[str, Any] | None:
    """Training loss over rounds: the mean over clients, and each client (where they are few)."""
    clients = list(dict.fromkeys(client for row in runs.rows for run in row.counted for client in run.losses))
    if not clients:
        return None

    def chart(title: str, loss: Callable[[MethodRow], dict[int, list[float]]]) -> dict[str, str]:
        lines = [_series(row, styles[row.method], loss(row)) for row in runs.rows]
        y_ticks = ticks(*_reach(lines))
        svg = line_chart(
            lines, f"Training loss over rounds, {title}", y_ticks, lambda v: f"{v:.3g}", ("round", "loss"), _span(lines)
        )
        return {"title": title, "svg": svg}

    few = clients if 1 < len(clients) <= MOST_CLIENTS else []
    return {
        "mean": chart("Mean over clients", lambda row: _losses(row, None)),
        "clients": [chart(client, lambda row, client=client: _losses(row, client)) for client in few],  # type: ignore[misc]
        "count": len(clients),
    }


def _losses(row: MethodRow, client: str | None) -> dict[int, list[float]]:
    """Loss by round, a value for each seed, over rounds that all seeds have."""
    by_seed: list[dict[int, float]] = []
    for run in row.counted:
        chosen = list(run.losses.values()) if client is None else [run.losses.get(client, {})]
        numbers = sorted({number for one in chosen for number in one})
        by_seed.append({number: average(one[number] for one in chosen if number in one) for number in numbers})
    common = set.intersection(*map(set, by_seed))
    return {number: [one[number] for one in by_seed] for number in sorted(common)}


def traffic(runs: RunSet) -> list[dict[str, str]]:
    """Training bytes up and down, stacked by entry kind, on one scale."""
    end = max((row.total_bytes(directions=[direction]) for row in runs.rows for direction in ("up", "down")), default=0)
    if not end:
        return []
    charts = []
    for direction, title in (("up", "From clients to the server"), ("down", "From the server to clients")):
        rows = []
        for row in runs.rows:
            found = _ordered(row.bytes_by_kind(direction))
            segments = [(size, _kind_class(kind), f"{kind_words(kind)}: {byte_words(size)}") for kind, size in found]
            rows.append(Bar(row.method, segments, byte_words(sum(size for _, size in found))))
        charts.append({"title": title, "svg": bars(rows, f"Training traffic. {title}", end, _byte_tick)})
    return charts


def _ordered(found: Mapping[str, float]) -> list[tuple[str, float]]:
    known = list(KINDS)
    return sorted(found.items(), key=lambda item: known.index(item[0]) if item[0] in known else len(known))


def traffic_kinds(runs: RunSet) -> list[tuple[str, str]]:
    """Entry kinds that travel in training, with their colours, for the legend."""
    kinds = {kind: 0.0 for row in runs.rows for direction in ("up", "down") for kind in row.bytes_by_kind(direction)}
    return [(_kind_class(kind), kind_words(kind)) for kind, _ in _ordered(kinds)]


def accuracy_against_bytes(runs: RunSet, styles: Mapping[str, int]) -> str | None:
    """Mean accuracy against training traffic; None below three methods."""
    view = "seen" if runs.domains("seen") else "unseen"
    shown = [row for row in runs.rows if row.finished and row.finals(view, MEAN) and row.total_bytes()]
    if len(shown) < 3:
        return None
    dots = [Dot(row.method, styles[row.method], row.total_bytes(), row.average(view, MEAN)) for row in shown]
    words = MEASURES[runs.measure]
    names = ("bytes in training, up and down", f"mean {words} ({view}), %")
    return scatter(dots, f"Mean {words} against bytes in training", (_byte_tick, _as_percent), names)


def curve_data(runs: RunSet, measures: Sequence[str]) -> dict[str, Any]:
    """The curves of all metrics, domains and methods as plain values, for the interactive chart: view, metric, domain, method."""
    found: dict[str, Any] = {}
    for view in runs.views:
        domains = runs.domains(view)
        keys: dict[str, Any] = {**({"mean": MEAN} if len(domains) > 1 else {}), **{f"domain {d}": d for d in domains}}
        for measure in measures:
            rows = runs.by(measure).rows
            by_domain = {name: [_points(row, view, key) for row in rows] for name, key in keys.items()}
            if any(len(one["rounds"]) > 1 for many in by_domain.values() for one in many):
                found.setdefault(view, {})[measure] = by_domain
    return found


def _points(row: MethodRow, view: str, key: Any) -> dict[str, list[float | None]]:
    rounds = [number for number in row.rounds(view) if row.scores(view, key, number)]
    values = [list(row.scores(view, key, number).values()) for number in rounds]
    spreads = [deviation(one) for one in values]
    return {
        "rounds": list(rounds),
        "mean": [round(100 * average(one), 3) for one in values],
        "spread": [None if math.isnan(one) else round(100 * one, 3) for one in spreads],
    }


def confusion_maps(runs: RunSet) -> list[dict[str, Any]]:
    """For each method, best first: a confusion matrix for each domain."""
    found = []
    for row in runs.ranked(runs.main_view):
        charts = []
        for view, domain in ((one, domain) for one in runs.views for domain in runs.domains(one)):
            matrix = row.confusion(view, domain)
            if matrix is not None and len(matrix) <= MOST_CLASSES_DRAWN:
                title = f"{domain}, unseen" if view == "unseen" and not runs.left_out else domain
                svg = confusion_map(matrix, row.first.class_names(len(matrix)), f"Confusion matrix, {row.method}, {title}")
                charts.append({"title": title, "svg": svg})
        if charts:
            found.append({"label": row.method, "charts": charts})
    return found
