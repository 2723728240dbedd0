"""``polyfed report``, ``analyse`` and ``watch``: results and progress of runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.options import REOPEN_OPTIONS, argument, command, flag, repeatable, shared
from polyfed.cli.output import console, print_json, print_line, status, warn
from polyfed.cli.tables import FittedTable, print_table
from polyfed.errors import SettingError, nearest
from polyfed.settings import AUTO, FACTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group

    from polyfed.cli.tables import Row
    from polyfed.studies.report.live import LiveRun


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
    "--out", "-o", metavar="FILE|DIR", help="Report file (default: report.html), or file or folder for tables and figures."
)
@click.option("--tables", metavar="FORMAT", help="Write tables instead of a page: md, csv, latex or json.")
@click.option("--figures", metavar="FORMAT", help="Write figures instead of a page: png, svg or pdf.")
@click.option("--metric", default=AUTO, help=f"Primary metric: {', '.join(FACTS['metric'].choices)}.")
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
@shared("allow unfinished")
def report(
    runs: tuple[str, ...],
    out: str | None,
    tables: str | None,
    figures: str | None,
    metric: str,
    pictures: bool | None,
    analyses: str,
    allow_unfinished: bool,
) -> None:
    """Write a self-contained HTML report.

    It shows the best method per domain, confidence intervals, costs, analyses, and commands to repeat the runs. Unfinished runs are
    labelled with their round and not ranked; --tables and --figures reject them.
    """
    if metric not in FACTS["metric"].choices:
        raise SettingError(f"--metric cannot be {metric!r}. {nearest(metric, FACTS['metric'].choices)}")
    if tables is not None or figures is not None:
        _export(runs, out, tables, figures, metric, allow_unfinished)
        return
    suffix = Path(out or "").suffix.lower()
    if suffix in OTHER_OPTIONS:
        raise SettingError(
            f"The report is an HTML page, but -o is {out}. Add {OTHER_OPTIONS[suffix]}, or pass a file name that ends in .html."
        )
    how: dict[str, Any] = {"metric": metric, "pictures": pictures, "analyses": analyses, "allow_unfinished": allow_unfinished}
    print_line(f"report: {api.report(runs, out or 'report.html', **how)}")


def _export(
    runs: tuple[str, ...], out: str | None, tables: str | None, figures: str | None, metric: str, allow_unfinished: bool
) -> None:
    from polyfed.studies.report.exports import write_figures, write_tables

    if tables is not None and figures is not None and out is not None and Path(out).suffix:
        raise SettingError(f"--tables and --figures write several files, but -o is a file ({out}). Pass a folder.")
    if tables is not None:
        print_line(f"tables: {write_tables(runs, out, tables, metric, allow_unfinished)}")
    if figures is not None:
        for path in write_figures(runs, out, figures, metric, allow_unfinished):
            print_line(f"figure: {path}")


@command(
    "analyse",
    "polyfed analyse runs/digits-mini-fedavg-seed0 runs/digits-mini-fedbn-seed0",
    "polyfed analyse runs/digits-mini-fedbn-seed0 --kind tsne --kind confidence -o why/",
)
@argument("runs", "RUN...", "Run folders, or folders that contain run folders.", nargs=-1)
@repeatable("--kind", metavar="NAME", help="Analysis to run; repeatable. Default: all.")
@click.option("--out", "-o", metavar="DIR", default="analysis", help="Folder for figures and tables.")
@click.option("--figures", metavar="FORMAT", default="png", help="Figure format: png, svg or pdf.")
@flag("--kinds", help="List the analyses, and exit.")
@click.option("--root", metavar="DIR", help="Data folder, if it has moved.")
@shared(*REOPEN_OPTIONS, "json", "quiet")
def analyse(
    runs: tuple[str, ...], kind: tuple[str, ...], out: str, figures: str, kinds: bool, as_json: bool, quiet: bool, **how: Any
) -> None:
    """Analyse trained runs: statistics, features, gradients, confidence. Runs are not modified; some analyses need their data."""
    from polyfed.studies.analyse.kinds import KINDS
    from polyfed.studies.report.exports import write_analyses

    if kinds:
        rows = [(name, known.what, "yes" if known.needs_data else "no") for name, known in KINDS.items()]
        print_table("", ("kind", "description", "needs data"), rows)
        return
    if not runs:
        raise SettingError("RUN is missing. Pass at least one run folder, or --kinds to list the analyses.")
    with status("Analysing", quiet):
        found = api.analyse(runs, kind, notify=warn, **how)
        written = write_analyses(found, out, figures)
    if not quiet:
        for analysis in found:
            print_line(f"{analysis.kind}: {analysis.sentence}")
        for skipped in found.skipped:
            print_line(f"{skipped.kind} does not apply to {skipped.run}: {skipped.reason}")
        print_line(f"Wrote {len(written)} files to {out}.")
    if as_json:
        print_json({"out": out, "files": [path.name for path in written], **found.as_json()})


@command("watch", "polyfed watch runs/digits-mini-fedbn-seed0")
@argument("path", "RUN", "Run folder, or folder that contains run folders.")
@click.option("--every", metavar="SECONDS", type=float, default=2.0, help="Seconds between updates.")
@flag("--once", help="Print the progress once, and exit.")
def watch(path: str, every: float, once: bool) -> None:
    """Show the progress of runs, with one curve per domain, until all have finished. Read-only."""
    from polyfed.studies.report.live import look_at, runs_in

    if not every > 0:
        raise SettingError(f"--every must be a number of seconds above 0, got {every:g}.")
    out = console()
    runs = [look_at(run) for run in runs_in(path)]
    if once or not out.is_terminal:
        out.print(_render(runs, out.width))
        return
    from rich.live import Live

    with Live(_render(runs, out.width), console=out, auto_refresh=False) as live:
        try:
            while not runs or any(run.state == "training" for run in runs):
                time.sleep(every)
                runs = [look_at(run) for run in runs_in(path)]
                live.update(_render(runs, out.width), refresh=True)
        except KeyboardInterrupt:
            return


def _render(runs: Sequence[LiveRun], width: int) -> Group:
    """Return a table with one line per run and domain."""
    from rich.console import Group

    from polyfed.studies.report.live import spark
    from polyfed.tasks.metrics import MEASURES

    only_mean = len(runs) > 6
    metrics = {MEASURES[run.measure] for run in runs} or {"accuracy"}
    shown: list[Row] = []
    for run in runs:
        rows = [
            (f"{view} {domain}", f"{100 * values[-1]:.1f}", spark(values))
            for (view, domain), values in run.curves.items()
            if domain == "mean" or not only_mean or (view, "mean") not in run.curves
        ]
        rows += [("training loss", f"{run.losses[-1]:.3f}", spark(run.losses))] if run.losses else []
        for index, cells in enumerate(rows or [("no results yet", "", "")]):
            shown.append([*((run.name, f"{run.round}/{run.rounds}", run.state) if index == 0 else ("", "", "")), *cells])
        shown.append(None)
    table = FittedTable(("run", "round", "state", "metric", "last", "curve"), shown, ("round", "last"))
    return Group(f"{' / '.join(sorted(metrics))} in %, and the training loss", table.build(width))
