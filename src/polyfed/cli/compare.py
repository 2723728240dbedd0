"""``polyfed compare``: several methods and seeds in one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.guard import BAD_INPUT, stoppable
from polyfed.cli.options import command, resolve_methods, resolve_values, settings_except, shared
from polyfed.cli.output import (
    View,
    console,
    log_to_stderr,
    print_footnotes,
    print_json,
    print_line,
    print_text,
    print_warnings,
    progress_bar,
    short_reason,
)
from polyfed.cli.tables import FittedTable, print_fitted, print_table, styled
from polyfed.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.cli.tables import Cell, Row
    from polyfed.studies.report.comparison import Comparison
    from polyfed.studies.report.costs import Expense, Spent
    from polyfed.studies.report.run_set import RunSet

ALWAYS_SHOWN = ("mean", "worst")
"""Columns that are shown even on narrow terminals."""
FIRST = ("methods", "seeds", "protocol", "rounds", "lr", "batch_size", "local_epochs", "model", "root", "workers", "recipe", "out")


@command(
    "compare",
    'polyfed compare digits-mini --methods "fedavg; fedbn; fedavg + group_norm" --seeds 3',
    'polyfed compare digits-mini --methods "fedavg; fedwon with lr=0.2, schedule=cosine"',
    'polyfed compare digits-mini --methods "fedavg; fedbn" --protocol leave-one-out',
    first=FIRST,
)
@shared("methods", "data")
@click.option("--seeds", metavar="N", type=int, default=1, help="Number of seeds per method: --seed, --seed + 1, ...")
@click.option("--protocol", default="seen", help="Evaluation protocol: seen, or leave-one-out (hold out each domain in turn).")
@click.option("--out", "-o", metavar="DIR", help="Folder for all runs. Default: runs/compare-<data>.")
@shared("recipe", "set", "trust", "track")
@click.option(
    "--costs/--no-costs",
    default=None,
    help="Show what clients upload, and the traffic, CPU time and memory relative to fedavg. Default: if fedavg is compared.",
)
@shared("estimate", "wide", "explain", "json", "quiet")
@settings_except("data", "method")
def compare(
    methods: str | None,
    seeds: int,
    protocol: str,
    out: str | None,
    track: Sequence[str],
    costs: bool | None,
    estimate: bool,
    wide: bool,
    explain: bool,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Train several methods and compare them in one table. Existing runs are reused."""
    from polyfed.runs.folder.paths import data_slug

    log_to_stderr(quiet)
    view = View(wide, explain)
    chosen = resolve_values(**values)
    chosen.pop("method", None)  # the method of the recipe, replaced by the compared methods
    compared = resolve_methods(methods, values["recipe"])
    if costs:
        _require_reference(compared, chosen.get("load", ()))
    if estimate:
        from polyfed.cli.estimating import print_estimate

        print_estimate(chosen, compared, as_json, quiet, view, seeds, protocol)
        return
    folder = Path(out) if out is not None else Path("runs") / f"compare-{data_slug(chosen['data'])}"
    with progress_bar(quiet) as bar, stoppable("Run the same command again to resume; finished runs are kept."):
        found = api.compare(**chosen, methods=compared, seeds=seeds, protocol=protocol, out=folder, callbacks=[bar], track=track)
    if not quiet:
        _print(found, costs is not False, view)
    if as_json:
        print_json(found.as_json())
    if found.problems:
        raise click.exceptions.Exit(BAD_INPUT)


def _require_reference(methods: Any, load: Sequence[str]) -> None:
    from polyfed.studies.compare.candidates import candidates
    from polyfed.studies.report.costs import REFERENCE
    from polyfed.trust import NOTHING, code_in

    texts = [one.text for one in candidates(methods, load, NOTHING.adding(code_in(load))).values()]
    if REFERENCE not in texts:
        raise SettingError(
            f'--costs needs {REFERENCE} as the reference, but --methods does not include it. Add it: "{REFERENCE}; {texts[0]}".'
        )


def _print(found: Comparison, costs: bool, view: View) -> None:
    from polyfed.studies.compare.compare import SEEN
    from polyfed.studies.report.sections import references_in
    from polyfed.tasks.metrics import MEASURES

    if found.reused:
        print(f"Reusing {found.reused} of {found.planned} runs from {found.folder}.", file=sys.stderr)
    print_warnings(found.warnings)
    data = found.data if found.protocol == SEEN else f"{found.data}, {found.protocol}: each domain held out in turn"
    print_methods(f"{data}: {MEASURES[found.metric]} in %", found.run_set, view)
    reason = found.metric_reason if found.metric != "accuracy" else ""
    always = [short_reason(found.metric_reason, found.metric)]
    print_footnotes(_summarise(found), [reason, found.significance, found.note], view, always)
    references = references_in(found.rows) if costs else []
    if references:
        _print_costs(found.costs, references[0].spent, view)
    print_line(f"run folders: {found.folder}")


def _summarise(found: Comparison) -> str:
    """Return the most important footnote of the table, on one line."""
    seeds = len(found.seeds)
    error_note = "± is the standard error." if seeds == 1 else f"± is the standard deviation over {seeds} seeds."
    return " ".join([*(verdict.summary for verdict in found.verdicts if verdict.summary), error_note])


def _print_costs(rows: Sequence[Expense], reference: Spent, view: View) -> None:
    from polyfed.studies.report.costs import HEADS, NOTE, REFERENCE, cells, describe_reference

    print_table(
        f"cost and privacy relative to {REFERENCE}",
        ("method", *HEADS),
        [(row.method, *cells(row)) for row in rows],
        view,
        [head for head in HEADS if head != "granularity"],
        [["granularity"], [HEADS[0]], [HEADS[-1]]],
    )
    if view.explain:
        uploads = [
            f"{row.method} uploads: {row.data_derived_uploads} ({row.granularity or 'granularity not declared'})."
            for row in rows
            if row.data_derived_uploads
        ]
        print_footnotes("", [*uploads, describe_reference(reference), NOTE], view)


def print_methods(title: str, runs: RunSet, view: View) -> None:
    """Print the table of methods, and the problems of methods that could not be run with all seeds."""
    print_fitted(title, _fitting(runs, console().width, view), view)
    for failure in dict.fromkeys(row.failure for row in runs.rows if row.problem):
        print_text(f"{'; '.join(row.method for row in runs.rows if row.problem and row.failure == failure)} {failure}")
    for row in runs.rows:
        if row.missing:
            print_text(row.note)


def _fitting(runs: RunSet, width: int, view: View) -> FittedTable:
    """Return the table with one line per method, or with stacked errors if the domain columns fit only in that form."""
    flat = _method_table(runs, stacked=False)
    if view.wide or not flat.hidden(width):
        return flat
    stacked = _method_table(runs, stacked=True)
    names = {column.name for column in runs.all_columns()}
    return flat if names & set(stacked.hidden(width)) else stacked


def _method_table(runs: RunSet, stacked: bool) -> FittedTable:
    """Return a table with one row per method and the best values in bold. ``stacked`` puts errors below their numbers."""
    from polyfed.runs.scores import BASELINE
    from polyfed.studies.report.words import percent

    columns = runs.all_columns()
    cost_columns = {"MB up": ("bytes_up", 1e6, 3), "MB down": ("bytes_down", 1e6, 3), "s": ("seconds", 1, 1)}
    cheapest = {name: runs.cheapest(field) for name, (field, _, _) in cost_columns.items()}
    names = [column.name for column in columns]
    unseen = [name for name in names if name.startswith("unseen: ")]
    domains = [name for name in names if name not in (*ALWAYS_SHOWN, *unseen)]

    def styled_cell(text: str, bold: bool) -> Cell:
        text = text.replace(" ±", "\n±") if stacked else text
        return styled(text, "bold") if bold else text

    shown: list[Row] = []
    for row in runs.listed:
        if row.problem:
            mark = "-" if row.divergence is None else "diverged"
            shown.append([row.method, mark, *("-" for _ in (*columns, *cost_columns)[1:])])
            continue
        costs = [
            styled_cell(f"{getattr(row, field) / unit:.{digits}f}", row in cheapest[name])
            for name, (field, unit, digits) in cost_columns.items()
        ]
        scores = runs.cells(row, columns)
        found = ["-" if one.number is None else styled_cell(percent(*one.number[:2]), one.best) for one in scores]
        shown.append([row.label, *found, *costs])
    baseline = runs.baseline(columns)
    if baseline:
        cells = [percent(baseline[column]) if column in baseline else "-" for column in columns]
        shown += [None, [styled(text, "dim") for text in (BASELINE, *cells, *("" for _ in cost_columns))]]
    optional = [unseen, domains, ["MB up"], ["s"], ["MB down"]]
    return FittedTable(("method", *names, *cost_columns), shown, (*names, *cost_columns), optional)
