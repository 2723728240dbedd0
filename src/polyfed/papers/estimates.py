"""What one experiment would cost: measured on its data where this machine has them, else by the speed of its networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from polyfed.errors import PolyfedError
from polyfed.papers.budget import core_seconds
from polyfed.papers.files import PaperItem
from polyfed.papers.grid import Form, cells_of, planned_runs
from polyfed.papers.reproduction import data_problems
from polyfed.studies.compare.estimate import estimate_run

SECONDS = 5.0
"""How long each run may be measured: an experiment has dozens."""


def estimate_item(item: PaperItem, form: Form, root: str | None, notify: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each group of runs that differ in their seed only: core-seconds of all of them, and how that was found."""
    if root is not None:
        form = dataclasses.replace(form, changes={**form.changes, "root": root})
    runs = planned_runs(cells_of(item, form), form)
    absent = data_problems(runs)
    for number, (folder, run) in enumerate(runs.items(), 1):
        notify(f"Measuring {run.words} ({number} of {len(runs)})")
        settings = dataclasses.asdict(run.settings)
        seconds, how = core_seconds(run.settings), "speed of the network; no data here"
        if folder not in absent:
            data, method, model = (settings.pop(name) for name in ("data", "method", "model"))
            try:
                seconds, how = estimate_run(data, method, model, SECONDS, **settings).cpu_seconds, "measured"
            except PolyfedError as error:
                how = f"speed of the network; it cannot be measured: {error}"
        yield {
            "run": run.words,
            "method": run.settings.method,
            "seeds": run.seeds,
            "core_seconds": None if seconds is None else seconds * run.seeds,
            "how": how,
        }
