"""``polyfed run`` and ``polyfed resume``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.guard import stoppable
from polyfed.cli.options import command, resolve_values, settings_except, shared
from polyfed.cli.output import (
    FITTED,
    View,
    console,
    log_to_stderr,
    print_footnotes,
    print_json,
    print_line,
    print_warnings,
    progress_bar,
    short_reason,
)
from polyfed.cli.tables import print_table
from polyfed.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.cli.tables import Row
    from polyfed.runs.result import Result

ERROR_NOTE = "± is the standard error over the test images."


@command(
    "run",
    "polyfed run digits-mini --method fedbn --rounds 20 --unseen street",
    "polyfed run my_images/ --method 'fedbn + agc(clip=1.28)' --json",
    first=("method", "rounds", "lr", "batch_size", "local_epochs", "model", "unseen", "seed", "root", "workers", "recipe", "out"),
)
@shared("data")
@click.option("--out", "-o", metavar="DIR", help="Run folder to create. Default: runs/<data>-<method>-seed<seed>.")
@shared("recipe", "set", "trust", "track", "estimate", "wide", "explain", "json", "quiet")
@settings_except("data")
def run(
    out: str | None, track: Sequence[str], estimate: bool, wide: bool, explain: bool, as_json: bool, quiet: bool, **values: Any
) -> None:
    """Train one method, evaluate it, and write a run folder."""
    log_to_stderr(quiet)
    chosen = resolve_values(**values)
    if estimate:
        from polyfed.cli.estimating import print_estimate

        print_estimate(chosen, chosen.pop("method", Settings.method), as_json, quiet, View(wide, explain))
        return
    from polyfed.runs.folder.paths import default_folder

    with (
        progress_bar(quiet) as bar,
        stoppable(lambda: f"Resume it with: polyfed resume {bar.run.path}" if hasattr(bar, "run") else ""),
    ):
        result = api.run(**chosen, out=out if out is not None else default_folder, callbacks=[bar], track=track, progress=False)
    report(result, as_json, quiet, View(wide, explain))


@command("resume", "polyfed resume runs/digits-mini-fedbn-seed0")
@shared("run")
@click.option("--root", metavar="DIR", help="Data set folder or image folder, if it has moved.")
@shared("resume device", "moved load", "override model", "trust", "wide", "explain", "json", "quiet")
def resume(path: str, wide: bool, explain: bool, as_json: bool, quiet: bool, **how: Any) -> None:
    """Resume an interrupted run. The result is identical to that of an uninterrupted run."""
    log_to_stderr(quiet)
    with stoppable(f"Resume it with: polyfed resume {path}"), progress_bar(quiet, message=True) as bar:
        result = api.resume(path, **how, progress=False, callbacks=[bar])
    report(result, as_json, quiet, View(wide, explain))


def report(result: Result, as_json: bool, quiet: bool, view: View) -> None:
    summary = result.summary()
    if not quiet:
        print_scores(summary, view=view)
        console().print(summary["training"], markup=False)
        _print_costs(summary)
        _print_privacy(summary.get("privacy"), view)
        print_line(f"run folder: {summary['run']}")
    if as_json:
        print_json({**summary, "notices": result.experiment.notices})


def print_scores(summary: dict[str, Any], title: str | None = None, view: View = FITTED) -> None:
    """Print the primary metric per domain, next to the baseline of the most frequent class."""
    from polyfed.runs.scores import BASELINE
    from polyfed.studies.report.run_record import domain_rows
    from polyfed.studies.report.words import format_rounds, percent
    from polyfed.tasks.metrics import MEASURES

    print_warnings([summary["warning"]] if "warning" in summary else [])
    metric = summary["metric"]
    rows = domain_rows(summary, metric)
    has_classes = not rows or not all(math.isnan(row.majority) for row in rows)
    errors = [] if has_classes else domain_rows(summary, "mean_absolute_error")
    extra = [*(["accuracy %"] if metric != "accuracy" else []), f"{BASELINE} %"] if has_classes else ["mean absolute error"]
    several = any(row.clients > 1 for row in rows)
    columns = [f"{MEASURES[metric]} %", *extra, "test images", *(["clients"] if several else [])]
    shown: list[Row] = []
    for index, row in enumerate(rows):
        cells = [row.domain, percent(row.value, row.error)]
        if has_classes:
            cells += [*([percent(row.accuracy)] if metric != "accuracy" else []), percent(row.majority)]
        else:
            cells.append(f"{errors[index].value:.4g}")
        cells += [str(row.count), *([str(row.clients)] if several else [])]
        shown += _grouped(row.view, rows[index - 1].view if index else None, cells)
    rounds = format_rounds(summary["rounds"])
    heading = title or f"{summary['method']} on {summary['data']}, {rounds}"
    print_table(heading, ("view", "domain", *columns), shown, view, columns, [[name] for name in columns[1:]])
    headline = summary["headline"]
    out = console()
    if rows:
        out.print(
            f"{MEASURES[metric]} over {'seen' if headline['seen'] else 'unseen'} domains: mean [bold]{percent(headline['mean'])}[/bold], "
            f"worst {percent(headline['worst'])}, spread {percent(headline['spread'])}"
        )
    if "last_rounds" in summary:
        ends = summary["last_rounds"]
        out.print(
            f"last {len(ends['rounds'])} evaluated rounds: mean [bold]{percent(ends['mean'])}[/bold] ± {percent(ends['deviation'])}, "
            f"round {ends['rounds'][-1]} {percent(ends['last'])}"
        )
    sample = summary["scored_clients"]
    notes = [
        ERROR_NOTE,
        "worst: the domain with the lowest value. spread: the highest value minus the lowest.",
        f"{BASELINE}: accuracy of always predicting that class." if has_classes else "",
        summary["metric_reason"] if metric != "accuracy" else "",
        f"Evaluated {sample['scored']} of {sample['clients']} clients, selected at random (--evaluate-clients)." if sample else "",
    ]
    print_footnotes(ERROR_NOTE if rows else "", notes, view, [short_reason(summary["metric_reason"], metric)])


def _grouped(group: str, previous: str | None, cells: list[str]) -> list[Row]:
    """Return a row. The first row of a group shows its name; a line separates groups."""
    if group == previous:
        return [["", *cells]]
    return [[group, *cells]] if previous is None else [None, [group, *cells]]


def _print_privacy(account: dict[str, Any] | None, view: View) -> None:
    """Print the privacy budget that was spent, in one line if it is the same for all clients."""
    if account is None or not account["clients"]:
        return
    rows = account["clients"]
    if len({round(row["epsilon_spent"], 6) for row in rows.values()}) > 1:
        keys = ("epsilon_spent", "epsilon", "noise_multiplier", "sample_rate")
        print_table(
            "privacy per client",
            ("client", "epsilon spent", "of", "noise multiplier", "sample rate", "steps"),
            [(name, *(f"{row[key]:.4g}" for key in keys), str(row["steps"])) for name, row in rows.items()],
            view,
            ("epsilon spent", "of", "steps"),
            [["steps"], ["noise multiplier"], ["sample rate"]],
        )
    console().print(
        f"privacy of {account['protects']}: epsilon {account['epsilon_spent']:.4g} of {account['epsilon']:g} spent at delta {account['delta']:g}; "
        f"noise at the {account['noise_at']}, from the {account['noise_from']}"
    )


def _print_costs(summary: dict[str, Any]) -> None:
    """Print the traffic per entry kind, and the duration."""
    from polyfed.studies.report.run_record import cost_rows
    from polyfed.studies.report.words import format_bytes

    shown: list[Row] = []
    previous = None
    for row in cost_rows(summary):
        shown += _grouped(row.purpose, previous, [row.kind.replace("_", " "), format_bytes(row.up), format_bytes(row.down)])
        previous = row.purpose
    console().print()
    columns = ("for", "entry kind", "up", "down")
    print_table("traffic of all clients and rounds", columns, shown, numbers=("up", "down"))
    up, down = format_bytes(summary["bytes_up"]), format_bytes(summary["bytes_down"])
    console().print(f"training: {up} up, {down} down, {summary['seconds']:.1f} seconds")
