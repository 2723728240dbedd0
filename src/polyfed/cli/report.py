"""``polyfed report``: one self-contained page about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.output import console
from polyfed.errors import RunFolderError

EXAMPLE = "Example: polyfed report runs/compare-digits-mini -o report.html"


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold run folders.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes.")] = "report.html",
) -> None:
    """Write a report: who won on which domain and how surely, curves, costs, what travelled, how to run it again."""
    from polyfed.report.html import write_report

    page = write_report(run_folders(runs), out)
    console().print(f"report: {page}", soft_wrap=True, markup=False)


def run_folders(paths: list[str]) -> list[Path]:
    """The run folders named, and those inside folders that are no run themselves."""
    from polyfed.folder import missing_words

    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(file.parent for file in path.glob("*/run.toml")) if not (path / "run.toml").is_file() else [path]
        if not inside:
            raise RunFolderError(f"{path} is not a run and holds none: {missing_words(path)}")
        found += inside
    return found
