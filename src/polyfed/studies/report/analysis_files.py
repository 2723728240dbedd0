"""Analyses as files: pictures, tables as CSV, and every number as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from polyfed.errors import SettingError, nearest
from polyfed.studies.analyse.analyse import Analyses
from polyfed.studies.report.exports import FIGURES, csv_of, save_figure, write_file
from polyfed.studies.report.json_values import json_values

NUMBERS = "analyses.json"


def write_analyses(analyses: Analyses, out: str | Path, form: str = "png", dots_per_inch: int = 150) -> list[Path]:
    """Write every picture, every table, and ``analyses.json``, into a folder.

    Args:
        analyses: what was found.
        out: the folder; it is made where it is missing.
        form: of the pictures: png, svg or pdf.
        dots_per_inch: of PNG pictures.
    """
    if form not in FIGURES:
        raise SettingError(f"--figures cannot be {form!r}. {nearest(form, FIGURES)}")
    folder, written = Path(out), list[Path]()
    for one in analyses:
        for name, figure in one.figures.items():
            written.append(folder / f"{file_name(one.kind, name)}{FIGURES[form]}")
            save_figure(written[-1], figure, dots_per_inch)
        for name, rows in one.tables.items():
            written.append(folder / f"{file_name(one.kind, name)}.csv")
            write_file(written[-1], csv_of(rows).encode())
    written.append(folder / NUMBERS)
    numbers = json.dumps(json_values(analyses.as_json()), indent=1, ensure_ascii=False)
    write_file(written[-1], f"{numbers}\n".encode())
    return written


def file_name(kind: str, name: str) -> str:
    """The name of a file: the kind, and what it holds where the kind does not say it."""
    return kind if kind.endswith(name) else f"{kind}-{name}"
