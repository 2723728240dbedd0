"""``--estimate``: what a command would cost, said instead of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.output import View, console, print_footnotes, print_json, say, status, warn
from polyfed.cli.tables import print_table

if TYPE_CHECKING:
    from polyfed.settings import Settings
    from polyfed.studies.compare.compare import ComparisonRun
    from polyfed.studies.compare.estimate import MethodEstimate

COLUMNS = ("method", "s once", "s a round", "rounds", "s a scoring", "scorings", "a run", "runs", "MB up", "MB down", "peak MB")
LATER = (("MB up", "MB down"), ("peak MB",), ("rounds", "s a round"), ("scorings", "s a scoring"), ("s once",))
NOTE = (
    "Processor time of this machine, from two rounds on a few batches of every client; expect a fifth more or less, more where others "
    "use the machine. Preparing data and writing checkpoints are not in it. MB are by client and round."
)


def print_estimate(runs: Sequence[ComparisonRun], data: Any, as_json: bool, quiet: bool, view: View) -> None:
    """Measure the method of every run, and print what all runs would cost."""
    with status("Preparing data", quiet) as shown:
        from polyfed.studies.compare.estimate import estimate_runs

        found = estimate_runs(runs, data, shown.update if shown else lambda text: None)
    settings = runs[0].settings
    if not quiet:
        for one in found:
            if one.problem:
                warn(f"{one.method} cannot be run: {one.problem}")
        for notice in dict.fromkeys(notice for one in found for notice in one.notices):
            warn(notice)
        _print(found, settings, view)
    if as_json:
        print_json(_as_json(found, settings))
    if any(one.problem for one in found):
        raise click.exceptions.Exit(BAD_INPUT)


def _print(estimates: Sequence[MethodEstimate], settings: Settings, view: View) -> None:
    """Print the table, and what everything would cost together."""
    rows = [(one.method, *(_cells(one) if one.runs else ["-"] * (len(COLUMNS) - 1))) for one in estimates]
    print_table(f"{settings.data}: what it would cost", COLUMNS, rows, view, COLUMNS[1:], LATER)
    console().print(_sum_words(estimates), style="bold", markup=False)
    for one in estimates:
        later = one.runs[0].later if one.runs else ()
        if later:
            starts = " and ".join(map(str, later))
            say(f"{one.method}: other entries travel from round {starts} on; only rounds before that were measured.")
    if settings.backend == "flower":
        say("With Flower, exchanging messages comes on top: benchmarks/flower.md has what that takes.")
    print_footnotes("Processor time of this machine.", [NOTE], view)


def _cells(estimate: MethodEstimate) -> list[str]:
    """Return the numbers of a method, means over its runs."""
    runs = estimate.runs
    once, a_round, scoring = (fmean(getattr(run, name) for run in runs) for name in ("once", "round", "scoring"))
    first = runs[0]
    return [
        f"{once:.1f}",
        f"{a_round:.2f}",
        str(first.rounds),
        f"{scoring:.1f}",
        str(first.scorings),
        time_words(estimate.cpu_seconds / len(runs)),
        str(len(runs)),
        f"{first.bytes_up / 1e6:.3f}",
        f"{first.bytes_down / 1e6:.3f}",
        "-" if first.peak is None else f"{first.peak / 1e6:.0f}",
    ]


def _sum_words(estimates: Sequence[MethodEstimate]) -> str:
    """Return what all runs cost together, and how long they take on the clock."""
    from polyfed.studies.report.words import format_bytes

    runs = sum(len(estimate.runs) for estimate in estimates)
    seconds = sum(estimate.cpu_seconds for estimate in estimates)
    traffic = sum(run.traffic for estimate in estimates for run in estimate.runs)
    workers = max((run.workers for estimate in estimates for run in estimate.runs), default=1)
    on_the_clock = sum(run.cpu_seconds / run.workers for estimate in estimates for run in estimate.runs)
    clock = f", {time_words(on_the_clock)} on the clock with {workers} workers" if workers > 1 else ""
    return f"{runs} run{'s' * (runs != 1)}: {time_words(seconds, 'core-')}{clock}; {format_bytes(traffic)} of traffic."


def time_words(seconds: float, kind: str = "") -> str:
    """Return seconds in the unit people would choose.

    >>> time_words(42), time_words(2520, "core-"), time_words(9000)
    ('42 seconds', '42 core-minutes', '2.5 hours')
    """
    if seconds < 100:
        return f"{seconds:.0f} {kind}seconds"
    return f"{seconds / 60:.0f} {kind}minutes" if seconds < 6000 else f"{seconds / 3600:.1f} {kind}hours"


def _as_json(estimates: Sequence[MethodEstimate], settings: Settings) -> dict[str, Any]:
    methods = [
        {
            "method": estimate.method,
            "cpu_seconds": estimate.cpu_seconds if estimate.runs else None,
            "runs": [{**dataclasses.asdict(run), "cpu_seconds": run.cpu_seconds} for run in estimate.runs],
            "problem": estimate.problem or None,
        }
        for estimate in estimates
    ]
    seconds = sum(estimate.cpu_seconds for estimate in estimates)
    return {"data": settings.data, "core_hours": seconds / 3600, "methods": methods, "note": NOTE}
