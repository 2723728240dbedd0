"""``--estimate``: what a command would cost, said instead of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from polyfed.cli.guard import BAD_INPUT
from polyfed.cli.output import busy, console, print_json, print_table, table, warn
from polyfed.errors import PolyfedError

if TYPE_CHECKING:
    from polyfed.cli.comparing import Job
    from polyfed.data.federation import Federation
    from polyfed.rehearsal import Estimate
    from polyfed.settings import Settings

COLUMNS = ("method", "s once", "s a round", "rounds", "s a scoring", "scorings", "a run", "runs", "MB up", "MB down", "peak MB")
NOTE = (
    "Processor time of this machine, from two rounds on a few batches of every client; expect a fifth more or less, more where others "
    "use the machine. Preparing data and writing checkpoints are not in it. MB are by client and round."
)


@dataclass
class Price:
    """What the runs of one method would cost, an estimate each."""

    method: str
    runs: list[Estimate] = field(default_factory=list)
    problem: str = ""
    notices: list[str] = field(default_factory=list)

    @property
    def cpu_seconds(self) -> float:
        """Of all runs."""
        return sum(run.cpu_seconds for run in self.runs)


def print_estimate(jobs: Sequence[Job], as_json: bool, quiet: bool, data: Any = None) -> None:
    """Rehearse the method of every job, and say what all jobs would cost; data that were read already need not be read again."""
    prices = prices_of(jobs, jobs[0].settings.data if data is None else data, quiet)
    settings = jobs[0].settings
    if not quiet:
        for notice in dict.fromkeys(notice for price in prices for notice in price.notices):
            warn(notice)
        show(prices, settings)
    if as_json:
        print_json(told(prices, settings))
    if any(price.problem for price in prices):
        raise typer.Exit(BAD_INPUT)


def prices_of(jobs: Sequence[Job], data: Any, quiet: bool) -> list[Price]:
    """The price of each method; one of several that cannot be built has a problem instead."""
    from polyfed.build import build_federation
    from polyfed.rehearsal import Rehearsal

    by_method: dict[str, list[Job]] = {}
    federations: dict[str | None, Federation] = {}
    for job in jobs:
        by_method.setdefault(job.method, []).append(job)
        if job.left_out not in federations:
            with busy("Preparing data", quiet):
                federations[job.left_out] = build_federation(data, job.settings)
    prices = []
    for number, (method, its_jobs) in enumerate(by_method.items(), 1):
        price = Price(method)
        prices.append(price)
        with busy(f"Rehearsing {method} ({number} of {len(by_method)})", quiet):
            try:
                rehearsal = Rehearsal(its_jobs[0].settings, federations[its_jobs[0].left_out])
                price.runs = [rehearsal.estimate(federations[job.left_out]) for job in its_jobs]
                price.notices = rehearsal.notices
            except PolyfedError as error:
                if len(by_method) == 1:
                    raise
                price.problem = str(error)
                if not quiet:
                    warn(f"{method} cannot be run: {error}")
    return prices


def show(prices: Sequence[Price], settings: Settings) -> None:
    """The table, and what everything would cost together."""
    from rich.markup import escape

    shown = table(COLUMNS, COLUMNS[1:])
    for price in prices:
        shown.add_row(escape(price.method), *(cells(price) if price.runs else ["-"] * (len(COLUMNS) - 1)))
    print_table(f"{settings.data}: what it would cost", shown)
    out = console()
    out.print(f"[bold]{escape(sum_words(prices))}[/bold]")
    for price in prices:
        later = price.runs[0].later if price.runs else ()
        if later:
            starts = " and ".join(map(str, later))
            out.print(
                f"{escape(price.method)}: other entries travel from round {starts} on; only rounds before that were rehearsed."
            )
    if settings.deliver == "flower":
        out.print("With Flower, exchanging messages comes on top: benchmarks/flower.md has what that takes.")
    out.print(f"[dim]{NOTE}[/dim]")


def cells(price: Price) -> list[str]:
    """The numbers of a method, means over its runs."""
    from statistics import fmean

    runs = price.runs
    once, a_round, scoring = (fmean(getattr(run, name) for run in runs) for name in ("once", "round", "scoring"))
    first = runs[0]
    return [
        f"{once:.1f}",
        f"{a_round:.2f}",
        str(first.rounds),
        f"{scoring:.1f}",
        str(first.scorings),
        time_words(price.cpu_seconds / len(runs)),
        str(len(runs)),
        f"{first.bytes_up / 1e6:.3f}",
        f"{first.bytes_down / 1e6:.3f}",
        "-" if first.peak is None else f"{first.peak / 1e6:.0f}",
    ]


def sum_words(prices: Sequence[Price]) -> str:
    """What all runs cost together, and how long they take on the clock."""
    from polyfed.report.byte_words import byte_words

    runs = sum(len(price.runs) for price in prices)
    seconds = sum(price.cpu_seconds for price in prices)
    traffic = sum(run.traffic for price in prices for run in price.runs)
    workers = max((run.workers for price in prices for run in price.runs), default=1)
    beside = sum(run.cpu_seconds / run.workers for price in prices for run in price.runs)
    clock = f", {time_words(beside)} on the clock with {workers} workers" if workers > 1 else ""
    return f"{runs} run{'s' * (runs != 1)}: {time_words(seconds, 'core-')}{clock}; {byte_words(traffic)} of traffic."


def time_words(seconds: float, kind: str = "") -> str:
    """Seconds in the unit people would choose.

    >>> time_words(42), time_words(2520, "core-"), time_words(9000)
    ('42 seconds', '42 core-minutes', '2.5 hours')
    """
    if seconds < 100:
        return f"{seconds:.0f} {kind}seconds"
    return f"{seconds / 60:.0f} {kind}minutes" if seconds < 6000 else f"{seconds / 3600:.1f} {kind}hours"


def told(prices: Sequence[Price], settings: Settings) -> dict[str, Any]:
    """Everything as JSON."""
    methods = [
        {
            "method": price.method,
            "cpu_seconds": price.cpu_seconds if price.runs else None,
            "runs": [{**dataclasses.asdict(run), "cpu_seconds": run.cpu_seconds} for run in price.runs],
            "problem": price.problem or None,
        }
        for price in prices
    ]
    seconds = sum(price.cpu_seconds for price in prices)
    return {
        "data": settings.data,
        "core_hours": seconds / 3600,
        "methods": methods,
        "note": NOTE,
    }
