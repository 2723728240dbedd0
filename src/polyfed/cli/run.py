"""``polyfed run`` and ``polyfed resume``: train one federation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.guard import stoppable
from polyfed.cli.options import chosen_values, command, settings_except, shared
from polyfed.cli.output import (
    FITTED,
    View,
    console,
    listen,
    print_footnotes,
    print_json,
    print_line,
    print_warnings,
    progress_bar,
    reason_in_short,
)
from polyfed.cli.tables import print_table
from polyfed.settings import Settings, with_changes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.cli.tables import Row
    from polyfed.runs.result import Result

ERROR_MEANING = "± is the standard error from the size of the test"


@command(
    "run",
    "polyfed run digits-mini --method fedbn --rounds 20 --unseen street",
    "polyfed run my_images/ --method 'fedbn + agc(clip=1.28)' --json",
    first=("method", "rounds", "lr", "batch_size", "local_epochs", "model", "unseen", "seed", "root", "workers", "recipe", "out"),
)
@shared("data")
@click.option("--out", "-o", metavar="DIR", help="Run folder; default: runs/<data>-<method>-seed<seed>.")
@shared("recipe", "set", "trust", "track", "estimate", "wide", "explain", "json", "quiet")
@settings_except("data")
def run(
    out: str | None,
    recipe: str | None,
    changes: Sequence[str],
    trust: bool,
    track: Sequence[str],
    estimate: bool,
    wide: bool,
    explain: bool,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Train a federation, score it, and write a run folder."""
    listen(quiet)
    chosen = chosen_values(values, recipe, changes, trust)
    if estimate:
        from polyfed.cli.estimating import print_estimate
        from polyfed.studies.compare.compare import ComparisonRun

        settings = with_changes(Settings(), chosen).trusted()
        one = ComparisonRun(settings.method, settings.seed, None, settings)
        print_estimate([one], settings.data, as_json, quiet, View(wide, explain))
        return
    from polyfed.runs.folder.paths import default_folder

    with progress_bar(quiet) as bar, stoppable(lambda: _go_on(bar)):
        result = api.run(**chosen, out=out if out is not None else default_folder, callbacks=[bar], track=track, progress=False)
    report(result, as_json, quiet, View(wide, explain))


def _go_on(bar: Any) -> str:
    """Return how to go on with a run; nothing if it was stopped before it had a folder."""
    return f"go on with: polyfed resume {bar.run.path}" if hasattr(bar, "run") else ""


@command("resume", "polyfed resume runs/digits-mini-fedbn-seed0")
@shared("run")
@click.option("--root", metavar="DIR", help="Folder of the run's data set, or of its images, where it lies elsewhere.")
@shared("another device", "load elsewhere", "model again", "trust", "wide", "explain", "json", "quiet")
def resume(path: str, wide: bool, explain: bool, as_json: bool, quiet: bool, **how: Any) -> None:
    """Go on with a run that was stopped; the end is the same as if it never had been."""
    listen(quiet)
    with stoppable(f"go on with: polyfed resume {path}"), progress_bar(quiet, message=True) as bar:
        result = api.resume(path, **how, progress=False, callbacks=[bar])
    report(result, as_json, quiet, View(wide, explain))


def report(result: Result, as_json: bool, quiet: bool, view: View) -> None:
    """Print what came out."""
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
    """Print the headline measure by domain, with the share of the most frequent class beside every accuracy; seen and unseen apart."""
    from polyfed.runs.scores import BASELINE
    from polyfed.studies.report.run_record import domain_rows
    from polyfed.studies.report.words import format_rounds, percent
    from polyfed.tasks.metrics import MEASURES

    print_warnings([summary["warning"]] if "warning" in summary else [])
    measure = summary["metric"]
    rows = domain_rows(summary, measure)
    has_classes = not rows or not all(math.isnan(row.majority) for row in rows)
    in_units = [] if has_classes else domain_rows(summary, "mean_absolute_error")
    beside = [*(["accuracy %"] if measure != "accuracy" else []), f"{BASELINE} %"] if has_classes else ["mean absolute error"]
    several = any(row.clients > 1 for row in rows)
    heads = [f"{MEASURES[measure]} %", *beside, "test images", *(["clients"] if several else [])]
    shown: list[Row] = []
    for place, row in enumerate(rows):
        cells = [row.domain, percent(row.value, row.error)]
        if has_classes:
            cells += [*([percent(row.accuracy)] if measure != "accuracy" else []), percent(row.majority)]
        else:
            cells.append(f"{in_units[place].value:.4g}")
        shown += _grouped(
            row.view, rows[place - 1].view if place else None, [*cells, str(row.count), *([str(row.clients)] if several else [])]
        )
    heading = title or f"{summary['method']} on {summary['data']}, {format_rounds(summary['rounds'])}"
    print_table(heading, ("view", "domain", *heads), shown, view, heads, [[head] for head in heads[1:]])
    found = summary["headline"]
    out = console()
    if rows:
        out.print(
            f"{MEASURES[measure]} over {'seen' if found['seen'] else 'unseen'} domains: mean [bold]{percent(found['mean'])}[/bold], "
            f"worst {percent(found['worst'])}, spread {percent(found['spread'])}"
        )
    if "last_rounds" in summary:
        ends = summary["last_rounds"]
        out.print(
            f"last {len(ends['rounds'])} scored rounds: mean [bold]{percent(ends['mean'])}[/bold] ± {percent(ends['deviation'])}, "
            f"round {ends['rounds'][-1]} {percent(ends['last'])}"
        )
    sample = summary["scored_clients"]
    meanings = [
        f"{ERROR_MEANING}.",
        "worst: the domain with the lowest value. spread: the highest less the lowest.",
        f"{BASELINE}: what answering that class for every image of the test would reach." if has_classes else "",
        summary["metric_reason"] if measure != "accuracy" else "",
        f"{sample['scored']} of {sample['clients']} clients were scored, drawn by the seed (--evaluate-clients)." if sample else "",
    ]
    print_footnotes(f"{ERROR_MEANING}." if rows else "", meanings, view, [reason_in_short(summary["metric_reason"], measure)])


def _grouped(group: str, before: str | None, cells: list[str]) -> list[Row]:
    """Return a row that names its group if the row before has another one, below a line."""
    if group == before:
        return [["", *cells]]
    return [[group, *cells]] if before is None else [None, [group, *cells]]


def _print_privacy(account: dict[str, Any] | None, view: View) -> None:
    """Print what was spent of a guarantee of privacy, by client; if all clients spent the same, in one line."""
    if account is None or not account["clients"]:
        return
    rows = account["clients"]
    if len({round(row["epsilon_spent"], 6) for row in rows.values()}) > 1:
        keys = ("epsilon_spent", "epsilon", "noise_multiplier", "sample_rate")
        print_table(
            "privacy, by client",
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
    """Print bytes by class of entry, and seconds."""
    from polyfed.studies.report.run_record import cost_rows
    from polyfed.studies.report.words import format_bytes

    shown: list[Row] = []
    before = None
    for row in cost_rows(summary):
        shown += _grouped(row.purpose, before, [row.kind.replace("_", " "), format_bytes(row.up), format_bytes(row.down)])
        before = row.purpose
    console().print()
    columns = ("for", "class of entry", "up", "down")
    print_table("traffic, all clients and rounds together", columns, shown, numbers=("up", "down"))
    console().print(
        f"training: {format_bytes(summary['bytes_up'])} up, {format_bytes(summary['bytes_down'])} down, {summary['seconds']:.1f} seconds"
    )
