"""Draw the figures of the report: curves, bars, confusion matrices, analyses, and images of the data.

Run folders contain no images, so the images are read from the data if it exists on this machine. By default, only runs of this account
are trusted to name data, because a run folder from elsewhere could name any folder.
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
from polyfed.studies.report.sections import ENTRY_KINDS
from polyfed.studies.report.words import capital, format_bytes, percent, points
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
    return f"k{list(ENTRY_KINDS).index(kind) if kind in ENTRY_KINDS else len(ENTRY_KINDS)}"


def _as_percent(value: float) -> str:
    return f"{100 * value:.3g}"


def _byte_tick(count: float) -> str:
    # As format_bytes, without trailing zeros.
    number, unit = format_bytes(count).split()
    return f"{float(number):g} {unit}"


def _series(row: MethodRow, style: int, by_round: Mapping[int, Sequence[float]]) -> Series:
    """Return a line through the means over seeds, with a band of one standard deviation on either side."""
    middle = [(number, average(values)) for number, values in by_round.items()]
    wide = {number: deviation(values) for number, values in by_round.items()}
    band = [(number, mean - wide[number], mean + wide[number]) for number, mean in middle if not math.isnan(wide[number])]
    return Series(row.method, style, middle, band)


def curves(runs: RunSet, view: str, styles: Mapping[str, int]) -> dict[str, Any] | None:
    """Draw a chart for the mean and for each domain: curves, or dots if only one round was evaluated."""
    domains = runs.domains(view)
    if not domains:
        return None
    names: dict[Any, str] = {**({MEAN: "Mean over domains"} if len(domains) > 1 else {}), **{domain: domain for domain in domains}}
    found = {"view": view, "several_seeds": any(len(row.seeds) > 1 for row in runs.rows)}
    if all(len(row.rounds(view)) <= 1 for row in runs.rows):
        charts = [{"title": name, "svg": _score_dots(runs, view, key, name, styles)} for key, name in names.items()]
        return {**found, "charts": charts, "only_last": True}
    lines = {key: [_series(row, styles[row.method], _scores_by_round(row, view, key)) for row in runs.rows] for key in names}
    metric = MEASURES[runs.measure]
    every = [one for many in lines.values() for one in many]
    y_ticks, span, labels = ticks(*_value_range(every)), _round_range(every), ("round", f"{metric}, %")
    charts = [
        {
            "title": names[key],
            "svg": line_chart(many, f"{capital(metric)} over rounds, {names[key]}", y_ticks, _as_percent, labels, span),
        }
        for key, many in lines.items()
    ]
    return {**found, "charts": charts, "only_last": False, "from": _as_percent(y_ticks[0])}


def _scores_by_round(row: MethodRow, view: str, key: Any) -> dict[int, list[float]]:
    found = {number: list(row.scores(view, key, number).values()) for number in row.rounds(view)}
    return {number: values for number, values in found.items() if values}


def _value_range(series: Sequence[Series]) -> tuple[float, float]:
    values = [value for one in series for _, value in one.points]
    return min(values, default=0.0), max(values, default=1.0)


def _round_range(series: Sequence[Series]) -> tuple[float, float]:
    rounds = [number for one in series for number, _ in one.points]
    return min(rounds, default=0.0), max(rounds, default=1.0)


def _score_dots(runs: RunSet, view: str, key: Any, name: str, styles: Mapping[str, int]) -> str:
    """Draw the last scores; whiskers are one standard deviation over seeds or, for one seed, the standard error of the test set."""
    rows = []
    for row in runs.rows:
        number = row.number(view, key) if row.finals(view, key) else None
        if number is not None:
            error = 0.0 if math.isnan(number.error) else number.error
            note = f"{percent(number.value)} %" + (f" ± {points(error)}" if error else "")
            bar = Bar(row.label, [(number.value, f"s{styles[row.method] % COLOURS}", f"{row.label}: {note}")], note, error)
            rows.append((not row.is_complete, -number.value, bar))
    rows.sort(key=lambda one: one[:2])
    return dot_rows([bar for *_, bar in rows], f"{capital(MEASURES[runs.measure])}, {name}", _as_percent)


def loss_charts(runs: RunSet, styles: Mapping[str, int]) -> dict[str, Any] | None:
    """Draw the training loss over rounds: the mean over clients, and each client if there are few."""
    clients = list(dict.fromkeys(client for row in runs.rows for run in row.counted for client in run.losses))
    if not clients:
        return None

    def chart(title: str, loss: Callable[[MethodRow], dict[int, list[float]]]) -> dict[str, str]:
        lines = [_series(row, styles[row.method], loss(row)) for row in runs.rows]
        y_ticks = ticks(*_value_range(lines))
        svg = line_chart(
            lines, f"Training loss over rounds, {title}", y_ticks, lambda v: f"{v:.3g}", ("round", "loss"), _round_range(lines)
        )
        return {"title": title, "svg": svg}

    few = clients if 1 < len(clients) <= MAX_CLIENTS else []
    return {
        "mean": chart("Mean over clients", lambda row: _losses(row, None)),
        "clients": [chart(client, lambda row, client=client: _losses(row, client)) for client in few],  # type: ignore[misc]
        "count": len(clients),
    }


def _losses(row: MethodRow, client: str | None) -> dict[int, list[float]]:
    """Return the losses of all seeds per round, for rounds that all seeds have."""
    by_seed: list[dict[int, float]] = []
    for run in row.counted:
        chosen = list(run.losses.values()) if client is None else [run.losses.get(client, {})]
        numbers = sorted({number for one in chosen for number in one})
        by_seed.append({number: average(one[number] for one in chosen if number in one) for number in numbers})
    common = set.intersection(*map(set, by_seed))
    return {number: [one[number] for one in by_seed] for number in sorted(common)}


def traffic(runs: RunSet) -> list[dict[str, str]]:
    """Draw training bytes up and down on one scale, stacked by entry kind."""
    end = max((row.total_bytes(directions=[direction]) for row in runs.rows for direction in ("up", "down")), default=0)
    if not end:
        return []
    charts = []
    for direction, title in (("up", "From clients to the server"), ("down", "From the server to clients")):
        rows = []
        for row in runs.rows:
            found = _sort_kinds(row.bytes_by_kind(direction))
            segments = [(size, _kind_class(kind), f"{ENTRY_KINDS.get(kind, kind)}: {format_bytes(size)}") for kind, size in found]
            rows.append(Bar(row.method, segments, format_bytes(sum(size for _, size in found))))
        charts.append({"title": title, "svg": bars(rows, f"Training traffic. {title}", end, _byte_tick)})
    return charts


def _sort_kinds(found: Mapping[str, float]) -> list[tuple[str, float]]:
    known = list(ENTRY_KINDS)
    return sorted(found.items(), key=lambda item: known.index(item[0]) if item[0] in known else len(known))


def traffic_kinds(runs: RunSet) -> list[tuple[str, str]]:
    """Return the colour and name of each entry kind in the training traffic, for the legend."""
    kinds = {kind: 0.0 for row in runs.rows for direction in ("up", "down") for kind in row.bytes_by_kind(direction)}
    return [(_kind_class(kind), ENTRY_KINDS.get(kind, kind)) for kind, _ in _sort_kinds(kinds)]


def accuracy_against_bytes(runs: RunSet, styles: Mapping[str, int]) -> str | None:
    """Draw the mean score over training traffic; return None for fewer than three methods."""
    view = "seen" if runs.domains("seen") else "unseen"
    shown = [row for row in runs.rows if row.finished and row.finals(view, MEAN) and row.total_bytes()]
    if len(shown) < 3:
        return None
    dots = [Dot(row.method, styles[row.method], row.total_bytes(), row.average(view, MEAN)) for row in shown]
    metric = MEASURES[runs.measure]
    names = ("training traffic, up and down", f"mean {metric} ({view}), %")
    return scatter(dots, f"Mean {metric} by training traffic", (_byte_tick, _as_percent), names)


def curve_data(runs: RunSet, measures: Sequence[str]) -> dict[str, Any]:
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
    found = _scores_by_round(row, view, key)
    spreads = [deviation(values) for values in found.values()]
    return {
        "rounds": list(found),
        "mean": [round(100 * average(values), 3) for values in found.values()],
        "spread": [None if math.isnan(spread) else round(100 * spread, 3) for spread in spreads],
    }


def confusion_maps(runs: RunSet) -> list[dict[str, Any]]:
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


def images_of(runs: RunSet, requested: bool | None) -> dict[str, Any]:
    """Return images of the data and confident mistakes, or a note that explains why there are none.

    Args:
        runs: The runs of a group.
        requested: False for no images; None for images only if this account made the runs.
    """
    nothing: dict[str, Any] = {"note": "", "images": None, "mistakes": []}
    if requested is False:
        return nothing
    run = runs.rows[0].first.folders[0]
    if run.document.get("given_in_python") or not run.document.get("data"):
        return nothing | {"note": "Example images are not available because the data was passed as Python objects."}
    folders = [Path(part.path) for each in runs.runs for part in each.folders]
    if not requested and not all(is_sealed((folder / "run.toml").read_bytes()) for folder in folders):
        return nothing | {"note": "Another account made these runs, so their images are not shown. Add --pictures to show them."}
    try:
        settings = RunFolder(run.path).settings()
        data = build_data_set(settings.data, settings)
        return {"note": "", "images": _example_images(data), "mistakes": _mistakes_of(runs, data)}
    except (PolyfedError, OSError) as error:
        return nothing | {"note": f"Example images are not shown because the data could not be read: {error}"}


def _example_images(data: DataSet) -> dict[str, Any] | None:
    classes = list(range(min(len(data.classes), MAX_CLASSES)))
    rows = []
    for domain in data.domains[:MAX_DOMAINS]:
        labels = domain.train.labels
        positions = [next(iter((labels == c).nonzero().flatten().tolist()), None) for c in classes]
        rows.append({"domain": domain.name, "cells": [None if p is None else _data_uri(domain.train, p) for p in positions]})
    if not any(cell for row in rows for cell in row["cells"]):
        return None
    return {"classes": [data.classes[c] for c in classes], "num_hidden": len(data.classes) - len(classes), "rows": rows}


def _data_uri(examples: Examples, position: int) -> str | None:
    """Return an image as a data URI, at most 72 pixels wide; None if the input is not an image."""
    from PIL import Image

    x, _ = examples.batch(torch.tensor([position]))
    if x.dim() != 4 or x.dtype != torch.uint8 or x.shape[1] not in (1, 3):
        return None
    image: Tensor = x[0].expand(3, -1, -1) if x.shape[1] == 1 else x[0]
    made = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    made.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    made.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _mistakes_of(runs: RunSet, data: DataSet) -> list[dict[str, Any]]:
    """Return the most confident mistakes of the best method and its first seed, by domain."""
    view = runs.main_view
    scored = [row for row in runs.ranked(view) if row.finals(view, MEAN) and row.first.answers]
    if not scored:
        return []
    best = scored[0]
    found = []
    for run in best.first.folders:
        federation = build_federation(data, dataclasses.replace(RunFolder(run.path).settings(), metric="auto"))
        for (of, client, domain), predictions in run.answers.items():
            if runs.left_out and of != "unseen":
                continue
            examples = _test_set(federation, of, client, domain)
            if examples is not None and len(examples) == len(predictions["labels"]):
                cells = _confident_mistakes(examples, predictions, run.class_names(len(data.classes)))
                found += [{"domain": domain, "view": of, "cells": cells}] if cells else []
    by_domain = {(row["view"], row["domain"]): row for row in reversed(found)}
    return [{"label": best.method, "rows": list(reversed(by_domain.values()))}] if by_domain else []


def _test_set(federation: Federation, view: str, client: str, domain: str) -> Examples | None:
    if view == "unseen":
        return federation.unseen.get(domain)
    return next((one.tests.get(domain) for one in federation.clients if one.id == client), None)


def _confident_mistakes(examples: Examples, predictions: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    wrong = (predictions["answers"] != predictions["labels"]).nonzero().flatten()
    order = wrong[predictions["confidence"][wrong].argsort(descending=True)][:MAX_MISTAKES].tolist()
    return [
        {
            "image": _data_uri(examples, position),
            "label": names[int(predictions["labels"][position])],
            "prediction": names[int(predictions["answers"][position])],
            "confidence": f"{100 * float(predictions['confidence'][position]):.0f} %",
        }
        for position in order
    ]


# ------------------------------------------------------------------------------------------------------------ analyses


def chosen_kinds(text: str) -> list[str]:
    """Return the analyses that ``--analyses`` selects: auto, all, none, or comma-separated names."""
    if text in (AUTO, ALL):
        return list(KINDS)
    return [] if text == NONE else kinds_named([name.strip() for name in text.split(",") if name.strip()])


def analyses_of(runs: RunSet, chosen: str) -> dict[str, Any]:
    """Analyse the first run of each method; ``auto`` reads only the run folders."""
    kinds = [name for name in chosen_kinds(chosen) if name != GRID]
    folders = [row.first.folders[0].path for row in runs.rows if row.records][:MAX_RUNS]
    if not kinds or not folders:
        return {"parts": [], "skipped": [], "note": ""}
    found = from_folders(folders, kinds) if chosen == AUTO else analyse_runs(folders, kinds, notify=lambda _: None)
    note = "These analyses use the first run of each method"
    note += f", which holds out {runs.left_out[0]}." if runs.left_out else "."
    note += f" They include the first {MAX_RUNS} of {len(runs.rows)} methods." if len(runs.rows) > MAX_RUNS else ""
    return {"parts": _parts_of(found), "skipped": found.skipped, "note": note}


def grid_of(sets: Sequence[RunSet], chosen: str) -> list[dict[str, Any]]:
    """Compare methods over a grid of settings, if the runs of all groups form one."""
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
            "figures": [_embed_figure(figure, f"{one.title}: {name}") for name, figure in one.figures.items()],
        }
        for one in found
    ]


def _embed_figure(figure: Any, description: str) -> dict[str, Any]:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * DOTS_PER_INCH)
    content = file.getvalue()
    width = struct.unpack(">I", content[16:20])[0]
    return {
        "source": f"data:image/png;base64,{base64.b64encode(content).decode()}",
        "description": description,
        "width": width // 2,
    }
