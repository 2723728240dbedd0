"""``polyfed report``: one self-contained page about one or several runs."""

from __future__ import annotations

from typing import Annotated

import typer

from polyfed.cli.output import console
from polyfed.run import report as write_report

EXAMPLE = "Example: polyfed report runs/compare-digits-mini -o report.html"


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold run folders.")],
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes.")] = "report.html",
) -> None:
    """Write a report: who won on which domain and how surely, curves, costs, what travelled, how to run it again."""
    page = write_report(runs, out)
    console().print(f"report: {page}", soft_wrap=True, markup=False)
