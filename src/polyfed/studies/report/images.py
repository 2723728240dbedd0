"""Images of the report: figures of analyses that explain scores, one image for each domain and class, and the most confident mistakes.

Run folders hold no image. If the data of a run is on this machine it is read again; if not, the report says so. Only data that this
account's runs name is read, unless it is requested: a run folder from elsewhere may name any folder.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import struct
from collections.abc import Sequence
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
from polyfed.studies.report.run_record import MEAN
from polyfed.studies.report.run_set import RunSet

ALL, NONE, GRID = "all", "none", "grid"
MOST_RUNS = 6
DOTS_PER_INCH = 100
SIDE = 72
MOST_CLASSES, MOST_DOMAINS, MOST_MISTAKES = 12, 12, 4


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
    classes = list(range(min(len(data.classes), MOST_CLASSES)))
    rows = []
    for domain in data.domains[:MOST_DOMAINS]:
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
    order = wrong[answers["confidence"][wrong].argsort(descending=True)][:MOST_MISTAKES].tolist()
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
    folders = [row.first.folders[0].path for row in runs.rows if row.records][:MOST_RUNS]
    if not kinds or not folders:
        return {"parts": [], "skipped": [], "note": ""}
    found = from_folders(folders, kinds) if chosen == AUTO else analyse_runs(folders, kinds, notify=lambda _: None)
    more = f" The first {MOST_RUNS} of {len(runs.rows)} methods." if len(runs.rows) > MOST_RUNS else ""
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
