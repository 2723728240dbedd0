"""``polyfed report``: one self-contained page about one or several runs, or their tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.api import report as write_report
from polyfed.cli.output import console
from polyfed.errors import SettingError, nearest
from polyfed.settings import AUTO, FACTS

EXAMPLE = (
    "Examples:\n\npolyfed report runs/compare-digits-mini -o report.html\n\n"
    "polyfed report runs/compare-digits-mini --tables latex -o tables.tex"
)
NOT_A_PAGE = {".tex": "--tables latex", ".md": "--tables md", ".csv": "--tables csv", ".json": "--tables json"} | {
    f".{form}": f"--figures {form}" for form in ("png", "svg", "pdf")
}


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold run folders.")],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE|DIR",
            help="Where it goes: the page (report.html), or the file or folder of tables and figures.",
        ),
    ] = None,
    tables: Annotated[
        str | None, typer.Option("--tables", metavar="FORM", help="Write tables instead: md, csv, latex or json.")
    ] = None,
    figures: Annotated[
        str | None, typer.Option("--figures", metavar="FORM", help="Write figures instead: png, svg or pdf.")
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            help="Measure that heads the tables: auto, accuracy, balanced_accuracy, macro_f1, auroc, mean_iou, exact_match, micro_f1 or r2.",
        ),
    ] = AUTO,
    pictures: Annotated[
        bool | None,
        typer.Option(
            "--pictures/--no-pictures",
            help="Show images of the data; default: where this account made the runs, and the data are here.",
            show_default=False,
        ),
    ] = None,
    analyses: Annotated[
        str,
        typer.Option(
            "--analyses",
            metavar="KINDS",
            help="Analyses in the page: auto (those that need no data), all, none, or kinds with commas between them.",
        ),
    ] = AUTO,
) -> None:
    """Write a report: who won, where, by how much and how surely; what it costs; why; how to run it again."""
    if metric not in FACTS["metric"].choices:
        raise SettingError(f"--metric cannot be {metric!r}. {nearest(metric, FACTS['metric'].choices)}")
    if tables is not None or figures is not None:
        export(runs, out, tables, figures, metric)
        return
    suffix = Path(out or "").suffix.lower()
    if suffix in NOT_A_PAGE:
        raise SettingError(
            f"A report is an HTML page, and -o names {out}. Add {NOT_A_PAGE[suffix]}, or name a file that ends in .html."
        )
    page = write_report(runs, out or "report.html", metric=metric, pictures=pictures, analyses=analyses)
    console().print(f"report: {page}", soft_wrap=True, markup=False)


def export(runs: list[str], out: str | None, tables: str | None, figures: str | None, metric: str) -> None:
    """Tables and figures instead of the page."""
    from polyfed.studies.report.exports import write_figures, write_tables

    if tables is not None and figures is not None and out is not None and Path(out).suffix:
        raise SettingError(f"--tables and --figures write several files, and -o names one ({out}). Name a folder.")
    if tables is not None:
        console().print(f"tables: {write_tables(runs, out, tables, metric)}", soft_wrap=True, markup=False)
    if figures is not None:
        for path in write_figures(runs, out, figures, metric):
            console().print(f"figure: {path}", soft_wrap=True, markup=False)
