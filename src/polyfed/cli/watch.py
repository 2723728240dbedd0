"""``polyfed watch``: progress of runs that another process trains."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from polyfed.cli.options import argument, command, flag
from polyfed.cli.output import console
from polyfed.cli.tables import FittedTable
from polyfed.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group

    from polyfed.cli.tables import Row
    from polyfed.studies.report.live import LiveRun


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
