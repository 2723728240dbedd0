"""``polyfed report``: a self-contained page about runs, or their tables and figures."""

from __future__ import annotations

from pathlib import Path

import click

from polyfed import api
from polyfed.cli.options import argument, command
from polyfed.cli.output import print_line
from polyfed.errors import SettingError, nearest
from polyfed.settings import AUTO, FACTS

OTHER_OPTIONS = {".tex": "--tables latex", ".md": "--tables md", ".csv": "--tables csv", ".json": "--tables json"} | {
    f".{form}": f"--figures {form}" for form in ("png", "svg", "pdf")
}


@command(
    "report",
    "polyfed report runs/compare-digits-mini -o report.html",
    "polyfed report runs/compare-digits-mini --tables latex -o tables.tex",
)
@argument("runs", "RUN...", "Run folders, or folders that contain run folders.", nargs=-1, required=True)
@click.option(
    "--out",
    "-o",
    metavar="FILE|DIR",
    help="Report file (default: report.html), or file or folder for tables and figures.",
)
@click.option("--tables", metavar="FORMAT", help="Write tables instead of a page: md, csv, latex or json.")
@click.option("--figures", metavar="FORMAT", help="Write figures instead of a page: png, svg or pdf.")
@click.option(
    "--metric",
    default=AUTO,
    help=f"Primary metric: {', '.join(FACTS['metric'].choices)}.",
)
@click.option(
    "--pictures/--no-pictures",
    default=None,
    help="Include images from the data. Default: only if this user account created the runs and the data is available.",
)
@click.option(
    "--analyses",
    metavar="KINDS",
    default=AUTO,
    help="Analyses to include: auto (those that need no data), all, none, or a comma-separated list.",
)
def report(
    runs: tuple[str, ...],
    out: str | None,
    tables: str | None,
    figures: str | None,
    metric: str,
    pictures: bool | None,
    analyses: str,
) -> None:
    """Write a self-contained HTML report.

    It shows the best method per domain, confidence intervals, costs, analyses, and commands to repeat the runs.
    """
    if metric not in FACTS["metric"].choices:
        raise SettingError(f"Unknown --metric {metric!r}. {nearest(metric, FACTS['metric'].choices)}")
    if tables is not None or figures is not None:
        _export(runs, out, tables, figures, metric)
        return
    suffix = Path(out or "").suffix.lower()
    if suffix in OTHER_OPTIONS:
        raise SettingError(
            f"The report is an HTML page, but -o is {out}. Add {OTHER_OPTIONS[suffix]}, or pass a file name that ends in .html."
        )
    print_line(f"report: {api.report(runs, out or 'report.html', metric=metric, pictures=pictures, analyses=analyses)}")


def _export(runs: tuple[str, ...], out: str | None, tables: str | None, figures: str | None, metric: str) -> None:
    from polyfed.studies.report.exports import write_figures, write_tables

    if tables is not None and figures is not None and out is not None and Path(out).suffix:
        raise SettingError(f"--tables and --figures write several files, but -o is a file ({out}). Pass a folder.")
    if tables is not None:
        print_line(f"tables: {write_tables(runs, out, tables, metric)}")
    if figures is not None:
        for path in write_figures(runs, out, figures, metric):
            print_line(f"figure: {path}")
