"""The pictures of the report: curves, bars and maps of a set of runs, figures of analyses, images of the data, confident mistakes.

Run folders hold no image. If the data of a run is on this machine it is read again; if not, the report says so. Only data that this
account's runs name is read, unless it is requested: a run folder from elsewhere may name any folder.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.core.data_types import DataSet, Examples, Federation
from polyfed.errors import PolyfedError
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.folder.account_key import is_sealed
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.settings import AUTO
from polyfed.studies.analyse.analyse import Analyses, analyse_runs, from_folders, kinds_named
from polyfed.studies.analyse.kinds import KINDS
from polyfed.studies.report.charts import COLOURS, Bar, Dot, Series, bars, confusion_map, dot_rows, line_chart, scatter, ticks
from polyfed.studies.report.run_record import MEAN, average, deviation
from polyfed.studies.report.run_set import MethodRow, RunSet
from polyfed.studies.report.sections import ENTRY_KINDS, kind_words
from polyfed.studies.report.words import byte_words, capital, percent, points
from polyfed.tasks.metrics import MEASURES

ALL, NONE, GRID = "all", "none", "grid"
MAX_RUNS = 6
DOTS_PER_INCH = 100
SIDE = 72
MAX_CLASSES, MAX_DOMAINS, MAX_MISTAKES = 12, 12, 4
MAX_CLIENTS = 16
MAX_CLASSES_DRAWN = 40


# -------------------------------------------------------------------------------------------------------------- charts


def _kind_class(kind: str) -> str:
    """The colour class of an entry kind."""
    return f"k{list(ENTRY_KINDS).index(kind) if kind in ENTRY_KINDS else len(ENTRY_KINDS)}"


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

    few = clients if 1 < len(clients) <= MAX_CLIENTS else []
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
    known = list(ENTRY_KINDS)
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
            if matrix is not None and len(matrix) <= MAX_CLASSES_DRAWN:
                title = f"{domain}, unseen" if view == "unseen" and not runs.left_out else domain
                svg = confusion_map(matrix, row.first.class_names(len(matrix)), f"Confusion matrix, {row.method}, {title}")
                charts.append({"title": title, "svg": svg})
        if charts:
            found.append({"label": row.method, "charts": charts})
    return found


# -------------------------------------------------------------------------------------------------------------- images


def images_of(runs: RunSet, asked_for: bool | None) -> dict[str, Any]:
    """The pictures of a group, or a sentence that says why there are none.

    Args:
        runs: the runs.
        asked_for: False: none; None: only of data that this account's own runs name.
    """
    if asked_for is False:
        return {"note": "", "images": None, "mistakes": []}
    run = runs.rows[0].first.folders[0]
    if run.document.get("given_in_python") or not run.document.get("data"):
        return _none("The data were given in Python, so their pictures cannot be shown here.")
    if not asked_for and not all(
        is_sealed((Path(one.path) / "run.toml").read_bytes()) for each in runs.runs for one in each.folders
    ):
        return _none("These runs were not made by this account, so the data they name were not read. --pictures shows them.")
    try:
        settings = RunFolder(run.path).settings()
        data = build_data_set(settings.data, settings)
        return {"note": "", "images": _one_of_each(data), "mistakes": _mistakes_of(runs, data)}
    except (PolyfedError, OSError) as error:
        return _none(f"Pictures need the data, which cannot be read here: {error}")


def _none(note: str) -> dict[str, Any]:
    return {"note": note, "images": None, "mistakes": []}


def _one_of_each(data: DataSet) -> dict[str, Any] | None:
    """The first training image of each domain and class."""
    classes = list(range(min(len(data.classes), MAX_CLASSES)))
    rows = []
    for domain in data.domains[:MAX_DOMAINS]:
        labels = domain.train.labels
        places = [next(iter((labels == c).nonzero().flatten().tolist()), None) for c in classes]
        rows.append({"domain": domain.name, "cells": [None if p is None else _data_uri(domain.train, p) for p in places]})
    if not any(cell for row in rows for cell in row["cells"]):
        return None
    return {"classes": [data.classes[c] for c in classes], "left_off": len(data.classes) - len(classes), "rows": rows}


def _data_uri(examples: Examples, place: int) -> str | None:
    """An image as a data address, at most 72 pixels wide; None where the input is no image."""
    from PIL import Image

    x, _ = examples.batch(torch.tensor([place]))
    if x.dim() != 4 or x.dtype != torch.uint8 or x.shape[1] not in (1, 3):
        return None
    image: Tensor = x[0].expand(3, -1, -1) if x.shape[1] == 1 else x[0]
    made = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    made.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    made.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _mistakes_of(runs: RunSet, data: DataSet) -> list[dict[str, Any]]:
    """For the best method and its first seed: the wrong answers it was surest of, by domain."""
    view = runs.main_view
    scored = [row for row in runs.ranked(view) if row.finals(view, MEAN) and row.first.answers]
    if not scored:
        return []
    best = scored[0]
    found = []
    for run in best.first.folders:
        federation = build_federation(data, dataclasses.replace(RunFolder(run.path).settings(), metric="auto"))
        for (of, client, domain), answers in run.answers.items():
            if runs.left_out and of != "unseen":
                continue
            examples = _tested(federation, of, client, domain)
            if examples is not None and len(examples) == len(answers["labels"]):
                cells = _surest(examples, answers, run.class_names(len(data.classes)))
                found += [{"domain": domain, "view": of, "cells": cells}] if cells else []
    by_domain = {(row["view"], row["domain"]): row for row in reversed(found)}
    return [{"label": best.method, "rows": list(reversed(by_domain.values()))}] if by_domain else []


def _tested(federation: Federation, view: str, client: str, domain: str) -> Examples | None:
    if view == "unseen":
        return federation.unseen.get(domain)
    return next((one.tests.get(domain) for one in federation.clients if one.id == client), None)


def _surest(examples: Examples, answers: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    wrong = (answers["answers"] != answers["labels"]).nonzero().flatten()
    order = wrong[answers["confidence"][wrong].argsort(descending=True)][:MAX_MISTAKES].tolist()
    return [
        {
            "image": _data_uri(examples, place),
            "label": names[int(answers["labels"][place])],
            "answer": names[int(answers["answers"][place])],
            "confidence": f"{100 * float(answers['confidence'][place]):.0f} %",
        }
        for place in order
    ]


def chosen_kinds(text: str) -> list[str]:
    """The kinds that ``--analyses`` names: auto, all, none, or names with commas between them."""
    if text in (AUTO, ALL):
        return list(KINDS)
    return [] if text == NONE else kinds_named([name.strip() for name in text.split(",") if name.strip()])


def analyses_of(runs: RunSet, chosen: str) -> dict[str, Any]:
    """The analyses of a set's methods, each by its first run; those of ``auto`` read nothing but the folders."""
    kinds = [name for name in chosen_kinds(chosen) if name != GRID]
    folders = [row.first.folders[0].path for row in runs.rows if row.records][:MAX_RUNS]
    if not kinds or not folders:
        return {"parts": [], "skipped": [], "note": ""}
    found = from_folders(folders, kinds) if chosen == AUTO else analyse_runs(folders, kinds, notify=lambda _: None)
    more = f" The first {MAX_RUNS} of {len(runs.rows)} methods." if len(runs.rows) > MAX_RUNS else ""
    left_out = f", which left out {runs.left_out[0]}" if runs.left_out else ""
    return {"parts": _parts_of(found), "skipped": found.skipped, "note": f"Each method by its first run{left_out}.{more}"}


def grid_of(sets: Sequence[RunSet], chosen: str) -> list[dict[str, Any]]:
    """One method against another over a grid, if the runs of the whole page make one."""
    if GRID not in chosen_kinds(chosen) or len(sets) < 2:
        return []
    folders = [part.path for runs in sets for row in runs.rows for run in row.counted for part in run.folders]
    return _parts_of(from_folders(folders, [GRID]))


def _parts_of(found: Analyses) -> list[dict[str, Any]]:
    return [
        {
            "title": one.title,
            "what": KINDS[one.kind].what,
            "sentence": one.sentence,
            "figures": [_picture(figure, f"{one.title}: {name}") for name, figure in one.figures.items()],
        }
        for one in found
    ]


def _picture(figure: Any, words: str) -> dict[str, Any]:
    """A figure as an image inside the page, with its width in the page's pixels."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * DOTS_PER_INCH)
    content = file.getvalue()
    width = struct.unpack(">I", content[16:20])[0]
    return {"source": f"data:image/png;base64,{base64.b64encode(content).decode()}", "words": words, "width": width // 2}
