"""Estimated cost of reproducing one experiment, or all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyfed.papers.costs import core_hours, estimate_item, max_core_hours
from polyfed.papers.files import item_names, read_item
from polyfed.papers.grid import Form, cells_of, planned_runs


def estimate_experiment(name: str, form: Form, root: str | None, notify: Callable[[str], None]) -> dict[str, Any]:
    """Return the cost of each run of an experiment, measured if its data exists."""
    rows = list(estimate_item(read_item(name), form, root, notify))
    seconds = sum(row["core_seconds"] for row in rows if row["core_seconds"] is not None)
    return {"experiment": name, "form": form.name, "core_hours": seconds / 3600, "runs": rows}


def estimate_experiments(form: Form) -> dict[str, Any]:
    """Return the cost of all experiments, computed from the measured speed of their networks. Shared runs count once in the total."""
    plans = {name: planned_runs(cells_of(read_item(name), form), form) for name in item_names()}
    rows = [
        {
            "name": name,
            "runs": sum(run.seeds for run in runs.values()),
            "max_core_hours_per_run": max_core_hours(runs.values()),
            "core_hours": core_hours(runs.values()),
        }
        for name, runs in plans.items()
    ]
    unique = {folder: run for runs in plans.values() for folder, run in runs.items()}.values()
    return {"experiments": rows, "runs": sum(run.seeds for run in unique), "core_hours": core_hours(unique), "form": form.name}
