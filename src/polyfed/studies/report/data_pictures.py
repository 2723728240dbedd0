"""Pictures for the report, read from the data themselves: one image for each domain and class, and the most confident mistakes.

Run folders hold no image. Where the data of a run are on this machine they are read again; where they are not, the report says so. Only
data that this account's own runs name are read, unless they are asked for: a run folder of somebody else may name any folder.
"""

from __future__ import annotations

import base64
import dataclasses
import io
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
from polyfed.studies.report.gather import MEAN, Group
from polyfed.studies.report.pictures import class_names

SIDE = 72
MOST_CLASSES, MOST_DOMAINS, MOST_MISTAKES = 12, 12, 4


def pictures_of(group: Group, asked_for: bool | None) -> dict[str, Any]:
    """The pictures of a group, or a sentence that says why there are none.

    Args:
        group: the runs.
        asked_for: False: none; None: only of data that this account's own runs name.
    """
    if asked_for is False:
        return {"note": "", "images": None, "mistakes": []}
    run = group.entries[0].first.folders[0]
    if run.document.get("given_in_python") or not run.document.get("data"):
        return _none("The data were given in Python, so their pictures cannot be shown here.")
    if not asked_for and not all(
        is_sealed((Path(one.path) / "run.toml").read_bytes()) for each in group.runs for one in each.folders
    ):
        return _none("These runs were not made by this account, so the data they name were not read. --pictures shows them.")
    try:
        settings = RunFolder(run.path).settings()
        data = build_data_set(settings.data, settings)
        return {"note": "", "images": one_of_each(data), "mistakes": mistakes_of(group, data)}
    except (PolyfedError, OSError) as error:
        return _none(f"Pictures need the data, which cannot be read here: {error}")


def _none(note: str) -> dict[str, Any]:
    return {"note": note, "images": None, "mistakes": []}


def one_of_each(data: DataSet) -> dict[str, Any] | None:
    """The first training image of each domain and class."""
    classes = list(range(min(len(data.classes), MOST_CLASSES)))
    rows = []
    for domain in data.domains[:MOST_DOMAINS]:
        labels = domain.train.labels
        places = [next(iter((labels == c).nonzero().flatten().tolist()), None) for c in classes]
        rows.append({"domain": domain.name, "cells": [None if p is None else data_uri(domain.train, p) for p in places]})
    if not any(cell for row in rows for cell in row["cells"]):
        return None
    return {"classes": [data.classes[c] for c in classes], "left_off": len(data.classes) - len(classes), "rows": rows}


def data_uri(examples: Examples, place: int) -> str | None:
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


def mistakes_of(group: Group, data: DataSet) -> list[dict[str, Any]]:
    """For the best method and its first seed: the wrong answers it was surest of, by domain."""
    view = "unseen" if group.left_out or not group.domains("seen") else "seen"
    scored = [entry for entry in group.entries if entry.finals(view, MEAN) and entry.first.answers]
    if not scored:
        return []
    best = max(scored, key=lambda entry: entry.mean(view, MEAN))
    found = []
    for run in best.first.folders:
        federation = build_federation(data, dataclasses.replace(RunFolder(run.path).settings(), metric="auto"))
        for (of, client, domain), answers in run.answers.items():
            if group.left_out and of != "unseen":
                continue
            examples = _tested(federation, of, client, domain)
            if examples is not None and len(examples) == len(answers["labels"]):
                cells = _surest(examples, answers, class_names(run, len(data.classes)))
                found += [{"domain": domain, "view": of, "cells": cells}] if cells else []
    by_domain = {(row["view"], row["domain"]): row for row in reversed(found)}
    return [{"label": best.label, "rows": list(reversed(by_domain.values()))}] if by_domain else []


def _tested(federation: Federation, view: str, client: str, domain: str) -> Examples | None:
    if view == "unseen":
        return federation.unseen.get(domain)
    return next((one.tests.get(domain) for one in federation.clients if one.id == client), None)


def _surest(examples: Examples, answers: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    wrong = (answers["answers"] != answers["labels"]).nonzero().flatten()
    order = wrong[answers["confidence"][wrong].argsort(descending=True)][:MOST_MISTAKES].tolist()
    return [
        {
            "image": data_uri(examples, place),
            "label": names[int(answers["labels"][place])],
            "answer": names[int(answers["answers"][place])],
            "confidence": f"{100 * float(answers['confidence'][place]):.0f} %",
        }
        for place in order
    ]
