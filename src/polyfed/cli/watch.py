"""``polyfed watch``: curves and scores of runs while another process trains them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli.output import console, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Group

    from polyfed.studies.report.live import LiveRun

EXAMPLE = "Example: polyfed watch runs/digits-mini-fedbn-seed0"


def watch(
    path: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a folder that holds run folders.")],
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
) -> None:
    """Show how far runs are, with a curve for each domain, until all are finished; it changes nothing in their folders."""
    from polyfed.errors import SettingError
    from polyfed.studies.report.live import look_at, runs_in

    if not every > 0:
        raise SettingError(f"--every takes a number of seconds above 0, found {every:g}.")
    out = console()
    found = [look_at(run) for run in runs_in(path)]
    if once or not out.is_terminal:
        out.print(shown(found))
        return
    from rich.live import Live

    with Live(shown(found), console=out, auto_refresh=False) as live:
        try:
            while not found or any(run.state == "training" for run in found):
                time.sleep(every)
                found = [look_at(run) for run in runs_in(path)]
                live.update(shown(found), refresh=True)
        except KeyboardInterrupt:
            return


def shown(runs: Sequence[LiveRun]) -> Group:
    """A table with a line for each run and domain."""
    from rich.console import Group
    from rich.markup import escape

    from polyfed.core.metrics import MEASURES
    from polyfed.studies.report.live import spark

    several = len(runs) > 6
    measures = {MEASURES[run.measure] for run in runs} or {"accuracy"}
    made = table(("run", "round", "state", "what", "last", "curve"), ("round", "last"))
    for run in runs:
        rows = [
            (f"{view} {domain}", f"{100 * values[-1]:.1f}", spark(values))
            for (view, domain), values in run.curves.items()
            if domain == "mean" or not several or (view, "mean") not in run.curves
        ]
        rows += [("training loss", f"{run.losses[-1]:.3f}", spark(run.losses))] if run.losses else []
        for place, (what, last, curve) in enumerate(rows or [("nothing was written yet", "", "")]):
            first = place == 0
            where = (escape(run.name), f"{run.round}/{run.rounds}", run.state) if first else ("", "", "")
            made.add_row(*where, escape(what), last, curve, end_section=place + 1 == len(rows))
    return Group(f"{' / '.join(sorted(measures))} in %, and the training loss", made)
