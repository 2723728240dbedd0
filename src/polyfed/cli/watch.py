"""``polyfed watch``: curves and scores of runs while another process trains them."""

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
@argument("path", "RUN", "A run folder, or a folder that holds run folders.")
@click.option("--every", metavar="SECONDS", type=float, default=2.0, help="Seconds between two looks.")
@flag("--once", help="Look once, and end.")
def watch(path: str, every: float, once: bool) -> None:
    """Show how far runs are, with a curve for each domain, until all are finished; it changes nothing in their folders."""
    from polyfed.studies.report.live import look_at, runs_in

    if not every > 0:
        raise SettingError(f"--every takes a number of seconds above 0, found {every:g}.")
    out = console()
    found = [look_at(run) for run in runs_in(path)]
    if once or not out.is_terminal:
        out.print(_shown(found, out.width))
        return
    from rich.live import Live

    with Live(_shown(found, out.width), console=out, auto_refresh=False) as live:
        try:
            while not found or any(run.state == "training" for run in found):
                time.sleep(every)
                found = [look_at(run) for run in runs_in(path)]
                live.update(_shown(found, out.width), refresh=True)
        except KeyboardInterrupt:
            return


def _shown(runs: Sequence[LiveRun], width: int) -> Group:
    """Return a table with a line for each run and domain."""
    from rich.console import Group

    from polyfed.studies.report.live import spark
    from polyfed.tasks.metrics import MEASURES

    several = len(runs) > 6
    measures = {MEASURES[run.measure] for run in runs} or {"accuracy"}
    shown: list[Row] = []
    for run in runs:
        rows = [
            (f"{view} {domain}", f"{100 * values[-1]:.1f}", spark(values))
            for (view, domain), values in run.curves.items()
            if domain == "mean" or not several or (view, "mean") not in run.curves
        ]
        rows += [("training loss", f"{run.losses[-1]:.3f}", spark(run.losses))] if run.losses else []
        for place, cells in enumerate(rows or [("nothing was written yet", "", "")]):
            shown.append([*((run.name, f"{run.round}/{run.rounds}", run.state) if place == 0 else ("", "", "")), *cells])
        shown.append(None)
    made = FittedTable(("run", "round", "state", "what", "last", "curve"), shown, ("round", "last"))
    return Group(f"{' / '.join(sorted(measures))} in %, and the training loss", made.fitted(width))
