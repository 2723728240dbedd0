"""Output of ``--estimate``: the estimated cost of a command."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.output import View, console, print_footnotes, print_json, print_text, status, warn
from polyfed.cli.tables import print_table

if TYPE_CHECKING:
    from polyfed.studies.compare.estimate import MethodEstimate

COLUMNS = (
    *("method", "setup s", "s per round", "rounds", "s per evaluation", "evaluations", "per run", "runs"),
    *("MB up", "MB down", "peak MB"),
)
OPTIONAL = (("MB up", "MB down"), ("peak MB",), ("rounds", "s per round"), ("evaluations", "s per evaluation"), ("setup s",))
NOTE = (
    "CPU time on this machine, from two rounds on a few batches of every client. Expect an error of about 20 %, or more if the "
    "machine is busy. Data preparation and checkpoints are not included. MB are per client and round."
)


def print_estimate(
    chosen: dict[str, Any], methods: Any, as_json: bool, quiet: bool, view: View, seeds: int = 1, protocol: str = "seen"
) -> None:
    """Measure every method, and print the cost of all runs."""
    with status("Preparing data", quiet) as shown:
        found = api.estimate_comparison(
            **chosen, methods=methods, seeds=seeds, protocol=protocol, notify=shown.update if shown else None
        )
    if not quiet:
        for estimate in found:
            if estimate.problem:
                warn(f"Cannot run {estimate.method}: {estimate.problem}")
        for notice in dict.fromkeys(notice for estimate in found for notice in estimate.notices):
            warn(notice)
        _print(found, chosen, view)
    if as_json:
        print_json(_as_json(found, chosen["data"]))
    if any(estimate.problem for estimate in found):
        raise click.exceptions.Exit(BAD_INPUT)


def _print(estimates: Sequence[MethodEstimate], chosen: dict[str, Any], view: View) -> None:
    rows = [(each.method, *(_cells(each) if each.runs else ["-"] * (len(COLUMNS) - 1))) for each in estimates]
    print_table(f"{chosen['data']}: estimated cost", COLUMNS, rows, view, COLUMNS[1:], OPTIONAL)
    console().print(_format_total(estimates), style="bold", markup=False)
    for each in estimates:
        if each.runs and each.runs[0].later:
            starts = " and ".join(map(str, each.runs[0].later))
            print_text(f"{each.method}: the exchanged entries change in round {starts}; only earlier rounds were measured.")
    if chosen.get("backend") == "flower":
        print_text("Message exchange with Flower is not included; benchmarks/flower.md has measurements.")
    print_footnotes("CPU time on this machine.", [NOTE], view)


def _cells(estimate: MethodEstimate) -> list[str]:
    """Return the table cells of a method, averaged over its runs."""
    runs = estimate.runs
    setup, per_round, per_evaluation = (fmean(getattr(run, name) for run in runs) for name in ("once", "round", "scoring"))
    first = runs[0]
    return [
        f"{setup:.1f}",
        f"{per_round:.2f}",
        str(first.rounds),
        f"{per_evaluation:.1f}",
        str(first.scorings),
        format_time(estimate.cpu_seconds / len(runs)),
        str(len(runs)),
        f"{first.bytes_up / 1e6:.3f}",
        f"{first.bytes_down / 1e6:.3f}",
        "-" if first.peak is None else f"{first.peak / 1e6:.0f}",
    ]


def _format_total(estimates: Sequence[MethodEstimate]) -> str:
    from polyfed.studies.report.words import format_bytes

    runs = [run for estimate in estimates for run in estimate.runs]
    seconds = sum(estimate.cpu_seconds for estimate in estimates)
    traffic = format_bytes(sum(run.traffic for run in runs))
    workers = max((run.workers for run in runs), default=1)
    wall_clock = format_time(sum(run.cpu_seconds / run.workers for run in runs))
    elapsed = f", {wall_clock} wall-clock time with {workers} workers" if workers > 1 else ""
    return f"{len(runs)} run{'s' * (len(runs) != 1)}: {format_time(seconds, 'core-')}{elapsed}; {traffic} of traffic."


def format_time(seconds: float, kind: str = "") -> str:
    """Format a duration in a readable unit.

    >>> format_time(42), format_time(2520, "core-"), format_time(9000)
    ('42 seconds', '42 core-minutes', '2.5 hours')
    """
    if seconds < 100:
        return f"{seconds:.0f} {kind}seconds"
    return f"{seconds / 60:.0f} {kind}minutes" if seconds < 6000 else f"{seconds / 3600:.1f} {kind}hours"


def _as_json(estimates: Sequence[MethodEstimate], data: str) -> dict[str, Any]:
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
    return {"data": data, "core_hours": seconds / 3600, "methods": methods, "note": NOTE}
