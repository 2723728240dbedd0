"""Searches in the report: what was tried for each method, what validation said, and what was chosen, read from ``sweep.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.errors import RunFolderError
from polyfed.studies.report.gather import SWEEP_FILE


def searches_in(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The searches among these folders."""
    return [read_search(Path(path)) for path in paths if (Path(path) / SWEEP_FILE).is_file()]


def read_search(folder: Path) -> dict[str, Any]:
    """One search as values for the page."""
    path = folder / SWEEP_FILE
    try:
        document = json.loads(path.read_text())
        axes = [str(name) for name in document["searched"]]
        rows = [row for method in document["methods"] for row in trial_rows(method, axes)]
        kind, chosen_by = str(document["search"]), str(document["chosen_by"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} cannot be read as a search ({type(error).__name__}: {error}).") from error
    return {"folder": str(folder), "kind": kind, "chosen_by": chosen_by, "axes": axes, "rows": rows}


def trial_rows(method: Mapping[str, Any], axes: Sequence[str]) -> list[dict[str, Any]]:
    """The trials of a method, best first; those that failed last."""
    chosen = (method["chosen"] or {}).get("run")
    ordered = sorted(method["trials"], key=lambda trial: 1.0 if trial["validation"] is None else -trial["validation"])
    return [
        {
            "method": str(method["method"]),
            "tried": [str(trial["values"].get(axis, "–")) for axis in axes],
            "validation": "failed" if trial["validation"] is None else f"{100 * trial['validation']:.1f}",
            "chosen": trial["run"] == chosen,
        }
        for trial in ordered
    ]
