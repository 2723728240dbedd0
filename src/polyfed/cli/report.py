"""``polyfed report``: one self-contained page about one or several runs, or their tables and figures."""

from __future__ import annotations

from pathlib import Path

import click

from polyfed import api
from polyfed.cli.options import argument, command
from polyfed.cli.output import print_line
from polyfed.errors import SettingError, nearest
from polyfed.settings import AUTO, FACTS

NOT_A_PAGE = {".tex": "--tables latex", ".md": "--tables md", ".csv": "--tables csv", ".json": "--tables json"} | {
    f".{form}": f"--figures {form}" for form in ("png", "svg", "pdf")
}


@command(
    "report",
    "polyfed report runs/compare-digits-mini -o report.html",
    "polyfed report runs/compare-digits-mini --tables latex -o tables.tex",
)
@argument("runs", "RUN...", "Run folders, or folders that hold run folders.", nargs=-1, required=True)
@click.option(
    "--out",
    "-o",
    metavar="FILE|DIR",
    help="Where it goes: the page (report.html), or the file or folder of tables and figures.",
)
@click.option("--tables", metavar="FORM", help="Write tables instead: md, csv, latex or json.")
@click.option("--figures", metavar="FORM", help="Write figures instead: png, svg or pdf.")
@click.option(
    "--metric",
    default=AUTO,
    help="Measure that heads the tables: auto, accuracy, balanced_accuracy, macro_f1, auroc, mean_iou, exact_match, micro_f1 or r2.",
)
@click.option(
    "--pictures/--no-pictures",
    default=None,
    help="Show images of the data; default: where this account made the runs, and the data are here.",
)
@click.option(
    "--analyses",
    metavar="KINDS",
    default=AUTO,
    help="Analyses in the page: auto (those that need no data), all, none, or kinds with commas between them.",
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
    """Write a report: who won, where, by how much and how surely; what it costs; why; how to run it again."""
    if metric not in FACTS["metric"].choices:
        raise SettingError(f"--metric cannot be {metric!r}. {nearest(metric, FACTS['metric'].choices)}")
    if tables is not None or figures is not None:
        _export(runs, out, tables, figures, metric)
        return
    suffix = Path(out or "").suffix.lower()
    if suffix in NOT_A_PAGE:
        raise SettingError(
            f"A report is an HTML page, and -o names {out}. Add {NOT_A_PAGE[suffix]}, or name a file that ends in .html."
        )
    print_line(f"report: {api.report(runs, out or 'report.html', metric=metric, pictures=pictures, analyses=analyses)}")


def _export(runs: tuple[str, ...], out: str | None, tables: str | None, figures: str | None, metric: str) -> None:
    """Write tables and figures instead of the page."""
    from polyfed.studies.report.exports import write_figures, write_tables

    if tables is not None and figures is not None and out is not None and Path(out).suffix:
        raise SettingError(f"--tables and --figures write several files, and -o names one ({out}). Name a folder.")
    if tables is not None:
        print_line(f"tables: {write_tables(runs, out, tables, metric)}")
    if figures is not None:
        for path in write_figures(runs, out, figures, metric):
            print_line(f"figure: {path}")
