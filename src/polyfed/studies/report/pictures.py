"""The pictures of the report: which lines, bars and dots are drawn from an group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyfed.core.metrics import MEASURES
from polyfed.studies.report.byte_words import byte_words
from polyfed.studies.report.charts import COLOURS, Bar, Dot, Series, bars, confusion_map, dot_rows, line_chart, scatter, ticks
from polyfed.studies.report.gather import MEAN, Group, GroupEntry, Run, average, deviation
from polyfed.studies.report.sections import KINDS, both_ways, byte_tick, kind_words, mean_bytes
from polyfed.studies.report.verdict import domain_error, mean_error, percent, points

MOST_CLIENTS = 16
MOST_CLASSES_DRAWN = 40


def kind_class(kind: str) -> str:
    """The colour class of a class of entries."""
    known = list(KINDS)
    return f"k{known.index(kind) if kind in known else len(known)}"


def _as_percent(value: float) -> str:
    return f"{100 * value:.3g}"


def _series(entry: GroupEntry, style: int, by_round: Mapping[int, Sequence[float]]) -> Series:
    """A line through the means over seeds, with a band of one standard deviation either side."""
    middle = [(number, average(values)) for number, values in by_round.items()]
    wide = {number: deviation(values) for number, values in by_round.items()}
    band = [(number, mean - wide[number], mean + wide[number]) for number, mean in middle if not math.isnan(wide[number])]
    return Series(entry.label, style, middle, band)


def curves(group: Group, view: str, styles: Mapping[str, int]) -> dict[str, Any] | None:
    """A chart for the mean and for each domain: curves, or bars where only one round was evaluated."""
    domains = group.domains(view)
    if not domains:
        return None
    keys: list[Any] = [*([MEAN] if len(domains) > 1 else []), *domains]
    names: dict[Any, str] = {MEAN: "Mean over domains", **{domain: domain for domain in domains}}
    if all(len(entry.rounds(view)) <= 1 for entry in group.entries):
        charts = [{"title": names[key], "svg": score_bars(group, view, key, names[key], styles)} for key in keys]
        return {
            "view": view,
            "charts": charts,
            "only_last": True,
            "several_seeds": any(len(entry.seeds) > 1 for entry in group.entries),
        }
    lines = {key: [_accuracy_series(entry, view, key, styles[entry.label]) for entry in group.entries] for key in keys}
    words = MEASURES[group.measure]
    y_ticks = ticks(*_reach([one for many in lines.values() for one in many]))
    span = _span([one for many in lines.values() for one in many])
    charts = [
        {
            "title": names[key],
            "svg": line_chart(
                many, f"{capital(words)} over rounds, {names[key]}", y_ticks, _as_percent, ("round", f"{words}, %"), span
            ),
        }
        for key, many in lines.items()
    ]
    several = any(len(entry.seeds) > 1 for entry in group.entries)
    return {"view": view, "charts": charts, "only_last": False, "several_seeds": several, "from": _as_percent(y_ticks[0])}


def _accuracy_series(entry: GroupEntry, view: str, key: Any, style: int) -> Series:
    found = {number: list(entry.scores(view, key, number).values()) for number in entry.rounds(view)}
    return _series(entry, style, {number: values for number, values in found.items() if values})


def _reach(series: Sequence[Series]) -> tuple[float, float]:
    values = [value for one in series for _, value in one.points]
    return min(values, default=0.0), max(values, default=1.0)


def _span(series: Sequence[Series]) -> tuple[float, float]:
    rounds = [number for one in series for number, _ in one.points]
    return min(rounds, default=0.0), max(rounds, default=1.0)


def score_bars(group: Group, view: str, key: Any, name: str, styles: Mapping[str, int]) -> str:
    """Last scores of all methods; whiskers are one standard deviation over seeds, else the binomial error."""
    rows = []
    for entry in group.entries:
        found = list(entry.finals(view, key).values())
        if not found:
            continue
        mean, spread = average(found), deviation(found)
        of_tests = mean_error(group, view, entry) if key == MEAN else domain_error(group, view, key, entry)
        error = next((value for value in (spread, of_tests) if not math.isnan(value)), 0.0)
        note = percent(mean) + (f" ± {points(error)}" if error else "")
        rows.append(Bar(entry.label, [(mean, f"s{styles[entry.label] % COLOURS}", f"{entry.label}: {note}")], note, error))
    rows.sort(key=lambda row: -row.segments[0][0])
    return dot_rows(rows, f"{capital(MEASURES[group.measure])}, {name}", _as_percent)


def loss_charts(group: Group, styles: Mapping[str, int]) -> dict[str, Any] | None:
    """Training loss over rounds: the mean over clients, and each client (where they are few)."""
    clients = list(dict.fromkeys(client for entry in group.entries for run in entry.counted for client in run.losses))
    if not clients:
        return None

    def chart(title: str, loss: Callable[[GroupEntry], dict[int, list[float]]]) -> dict[str, str]:
        lines = [_series(entry, styles[entry.label], loss(entry)) for entry in group.entries]
        y_ticks = ticks(*_reach(lines))
        svg = line_chart(
            lines, f"Training loss over rounds, {title}", y_ticks, lambda v: f"{v:.3g}", ("round", "loss"), _span(lines)
        )
        return {"title": title, "svg": svg}

    few = clients if 1 < len(clients) <= MOST_CLIENTS else []
    return {
        "mean": chart("Mean over clients", lambda entry: _losses(entry, None)),
        "clients": [chart(client, lambda entry, client=client: _losses(entry, client)) for client in few],  # type: ignore[misc]
        "count": len(clients),
    }


def _losses(entry: GroupEntry, client: str | None) -> dict[int, list[float]]:
    """Loss by round, a value for each seed, over rounds that all seeds have."""
    by_seed: list[dict[int, float]] = []
    for run in entry.counted:
        chosen = list(run.losses.values()) if client is None else [run.losses.get(client, {})]
        numbers = sorted({number for one in chosen for number in one})
        by_seed.append({number: average(one[number] for one in chosen if number in one) for number in numbers})
    common = set.intersection(*map(set, by_seed))
    return {number: [one[number] for one in by_seed] for number in sorted(common)}


def traffic(group: Group) -> list[dict[str, str]]:
    """Training bytes up and down, stacked by class of entry, on one scale."""
    shown = {d: [(entry, mean_bytes(entry, d, "training")) for entry in group.entries] for d in ("up", "down")}
    end = max((sum(found.values()) for many in shown.values() for _, found in many), default=0)
    if not end:
        return []
    charts = []
    for direction, title in (("up", "From clients to the server"), ("down", "From the server to clients")):
        rows = []
        for entry, found in shown[direction]:
            segments = [(size, kind_class(kind), f"{kind_words(kind)}: {byte_words(size)}") for kind, size in _ordered(found)]
            rows.append(Bar(entry.label, segments, byte_words(sum(found.values()))))
        charts.append({"title": title, "svg": bars(rows, f"Training traffic. {title}", end, byte_tick)})
    return charts


def _ordered(found: Mapping[str, float]) -> list[tuple[str, float]]:
    known = list(KINDS)
    return sorted(found.items(), key=lambda item: known.index(item[0]) if item[0] in known else len(known))


def traffic_kinds(group: Group) -> list[tuple[str, str]]:
    """Classes of entries that travel in training, with their colours, for the legend."""
    kinds = {kind: 0.0 for entry in group.entries for d in ("up", "down") for kind in mean_bytes(entry, d, "training")}
    return [(kind_class(kind), kind_words(kind)) for kind, _ in _ordered(kinds)]


def accuracy_against_bytes(group: Group, styles: Mapping[str, int]) -> str | None:
    """Mean accuracy against training traffic; None below three methods."""
    view = "seen" if group.domains("seen") else "unseen"
    shown = [entry for entry in group.entries if entry.finished and entry.finals(view, MEAN) and both_ways(entry, "training")]
    if len(shown) < 3:
        return None
    dots = [Dot(entry.label, styles[entry.label], both_ways(entry, "training"), entry.mean(view, MEAN)) for entry in shown]
    words = MEASURES[group.measure]
    names = ("bytes in training, up and down", f"mean {words} ({view}), %")
    return scatter(dots, f"Mean {words} against bytes in training", (byte_tick, _as_percent), names)


def capital(text: str) -> str:
    """The text with a capital letter in front."""
    return text[:1].upper() + text[1:]


def curve_data(group: Group, measures: Sequence[str]) -> dict[str, Any]:
    """The curves of all measures, domains and methods as plain values, for the interactive chart: view, measure, domain, method."""
    found: dict[str, Any] = {}
    for view in ("seen", "unseen"):
        domains = group.domains(view)
        keys: dict[str, Any] = {**({"mean": MEAN} if len(domains) > 1 else {}), **{f"domain {d}": d for d in domains}}
        for measure in measures if domains else ():
            looked_at = group.by(measure)
            by_domain = {name: [_points(entry, view, key) for entry in looked_at.entries] for name, key in keys.items()}
            if any(len(one["rounds"]) > 1 for many in by_domain.values() for one in many):
                found.setdefault(view, {})[measure] = by_domain
    return found


def _points(entry: GroupEntry, view: str, key: Any) -> dict[str, list[float | None]]:
    rounds = [number for number in entry.rounds(view) if entry.scores(view, key, number)]
    values = [list(entry.scores(view, key, number).values()) for number in rounds]
    spreads = [deviation(one) for one in values]
    return {
        "rounds": list(rounds),
        "mean": [round(100 * average(one), 3) for one in values],
        "spread": [None if math.isnan(one) else round(100 * one, 3) for one in spreads],
    }


def confusion_maps(group: Group) -> list[dict[str, Any]]:
    """For each method, best first: a confusion matrix for each domain, summed over seeds and clients."""
    view = "unseen" if group.left_out or not group.domains("seen") else "seen"
    ranked = sorted(group.entries, key=lambda entry: -(entry.mean(view, MEAN) if entry.finals(view, MEAN) else -1.0))
    found = []
    for entry in ranked:
        charts = []
        for of in ("seen", "unseen"):
            for domain in group.domains(of):
                matrices = [run.domains.get((of, domain), {}).get("confusion") for run in entry.counted]
                known = [matrix for matrix in matrices if matrix]
                if known and len(known[0]) <= MOST_CLASSES_DRAWN:
                    total = [[sum(m[i][j] for m in known) for j in range(len(known[0]))] for i in range(len(known[0]))]
                    names = class_names(entry.first, len(total))
                    title = f"{domain}, unseen" if of == "unseen" and not group.left_out else domain
                    charts.append({"title": title, "svg": confusion_map(total, names, f"Confusion matrix, {entry.label}, {title}")})
        if charts:
            found.append({"label": entry.label, "charts": charts})
    return found


def class_names(run: Run, count: int) -> list[str]:
    """The names of the classes, as the run wrote them down; numbers where it did not."""
    names = [str(name) for name in run.document.get("outline", {}).get("class_names", [])]
    return names if len(names) == count else [str(number) for number in range(count)]
