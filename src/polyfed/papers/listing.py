"""All experiments as rows of a list: paper, data, cost in each form, whether this machine has the data, and their state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polyfed.data.registry import data_sets
from polyfed.errors import PolyfedError
from polyfed.papers.budget import core_hours
from polyfed.papers.files import FORMS, PaperItem, item_names, read_item
from polyfed.papers.grid import Form, cells_of, planned_runs
from polyfed.papers.reproduction import FOLDER
from polyfed.text import read_call

READY, IN_PART, NOT_YET = "can be run", "in part", "not yet"


def experiment_rows(root: str | None = None, out: str | Path = FOLDER) -> list[dict[str, Any]]:
    """A row for each experiment."""
    here: dict[str, bool] = {}
    return [_row(read_item(name), root, Path(out), here) for name in item_names()]


def experiment_description(name: str) -> dict[str, Any]:
    """What an experiment claims, what it needs, and what it costs."""
    item = read_item(name)
    return {
        "kind": "experiment",
        **_row(item, None, Path(FOLDER), {}),
        "claim": item.claim,
        "measure": item.measure,
        "seeds": item.seeds,
        "note": item.note,
        "parts": [
            {"name": part.name, "methods": [row.name for row in part.rows], "columns": [column.name for column in part.columns]}
            for part in item.parts
        ],
        "command": f"polyfed reproduce {name} --root DATA",
    }


def _row(item: PaperItem, root: str | None, out: Path, here: dict[str, bool]) -> dict[str, Any]:
    cells = cells_of(item, Form())
    waiting = [cell.why_not.removeprefix("not yet: ") for cell in cells if cell.why_not.startswith("not yet")]
    missing = list(dict.fromkeys([*([item.missing] if item.missing and not waiting else []), *waiting]))
    state = state_of(item)
    forms = [Form(name, planned=state == NOT_YET) for name in FORMS]
    runs = {form.name: planned_runs(cells_of(item, form), form) for form in forms}
    full = runs["full"]
    data = list(dict.fromkeys(run.settings.data for run in full.values()))
    names = list(dict.fromkeys(map(data_name, data)))
    for text in data:
        if text not in here:
            here[text] = has_data(text, root)
    return {
        "name": item.name,
        "title": item.title,
        "paper": item.paper,
        "item": item.item,
        "data": names,
        "runs": sum(run.seeds for run in full.values()),
        **{f"core_hours_{form}": core_hours(many.values()) for form, many in runs.items()},
        "data_here": [name for name in names if all(here[text] for text in data if data_name(text) == name)],
        "state": state,
        "missing": missing,
        "run_folders": {form: _run_folders(many, out) for form, many in runs.items()},
    }


def here_words(row: dict[str, Any]) -> str:
    """Whether the data of a row are on this machine: yes, no, or how many of its data sets are."""
    asked, here = row["data"], row["data_here"]
    return "yes" if asked and len(here) == len(asked) else f"{len(here)} of {len(asked)}" if here else "no"


def data_name(text: str) -> str:
    """The name of a data set, without its options."""
    return read_call(text).name.replace("_", "-")


def state_of(item: PaperItem) -> str:
    """Whether all of its cells can be run with what polyfed has, some, or none."""
    cells = [cell for cell in cells_of(item, Form()) if cell.published.exists]
    waiting = [cell for cell in cells if cell.why_not.startswith("not yet")]
    if not cells or len(waiting) == len(cells):
        return NOT_YET
    return IN_PART if waiting or item.missing else READY


def has_data(text: str, root: str | None) -> bool:
    """Whether the files of a data set are there; nothing is decoded."""
    name = read_call(text).name
    if name not in data_sets:
        return False
    record = data_sets.find(name)
    declaration = record.extra.get("declaration")
    if declaration is None:
        return "root" not in record.signature.parameters
    if root is None:
        return False
    with contextlib.suppress(PolyfedError, OSError):
        return bool(declaration.sources_to_check(root))
    return False


def _run_folders(names: Iterable[str], out: Path) -> int:
    """How many runs of an experiment are there, finished or stopped."""
    return sum(1 for name in names for _ in (out / "runs" / name).glob("*/run.toml"))
