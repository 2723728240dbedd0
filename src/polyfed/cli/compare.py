"""``polyfed compare``: several methods over several seeds, in one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.guard import BAD_INPUT, stoppable
from polyfed.cli.options import chosen_values, command, compared_methods, settings_except, shared
from polyfed.cli.output import (
    View,
    console,
    listen,
    print_footnotes,
    print_json,
    print_line,
    print_warnings,
    progress_bar,
    reason_in_short,
    say,
    status,
)
from polyfed.cli.tables import FittedTable, print_fitted, print_table, styled
from polyfed.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.cli.tables import Cell, Row
    from polyfed.studies.report.comparison import Comparison
    from polyfed.studies.report.costs import Expense, Spent
    from polyfed.studies.report.run_set import Column, MethodRow

MOST_IMPORTANT = ("mean", "worst")
"""The columns that are shown on the narrowest terminal."""
FIRST = ("methods", "seeds", "protocol", "rounds", "lr", "batch_size", "local_epochs", "model", "root", "workers", "recipe", "out")


@command(
    "compare",
    'polyfed compare digits-mini --methods "fedavg; fedbn; fedavg + group_norm" --seeds 3',
    'polyfed compare digits-mini --methods "fedavg; fedwon with lr=0.2, schedule=cosine"',
    'polyfed compare digits-mini --methods "fedavg; fedbn" --protocol leave-one-out',
    first=FIRST,
)
@shared("methods", "data")
@click.option("--seeds", metavar="N", type=int, default=1, help="Seeds for each method: --seed, --seed + 1, ...")
@click.option("--protocol", default="seen", help="seen, or leave-one-out: every domain unseen in turn.")
@click.option("--out", "-o", metavar="DIR", help="Folder of the run folders; default: runs/compare-<data>.")
@shared("recipe", "set", "trust", "track")
@click.option(
    "--costs/--no-costs",
    default=None,
    help="Print what leaves clients, and extra bytes, CPU seconds and memory beside fedavg; default: where fedavg is compared.",
)
@shared("estimate", "wide", "explain", "json", "quiet")
@settings_except("data", "method")
def compare(
    methods: str | None,
    seeds: int,
    protocol: str,
    out: str | None,
    recipe: str | None,
    changes: Sequence[str],
    trust: bool,
    track: Sequence[str],
    costs: bool | None,
    estimate: bool,
    wide: bool,
    explain: bool,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Train several methods and compare them in one table; runs that are there already are reused."""
    from polyfed.runs.folder.paths import data_slug

    listen(quiet)
    view = View(wide, explain)
    chosen = chosen_values(values, recipe, changes, trust)
    chosen.pop("method", None)  # a recipe's own, in whose place the methods are compared
    compared = compared_methods(methods, recipe)
    if costs:
        _require_reference(compared, chosen.get("load", ()))
    if estimate:
        _print_estimates(chosen, compared, seeds, protocol, as_json, quiet, view)
        return
    folder = Path(out) if out is not None else Path("runs") / f"compare-{data_slug(chosen['data'])}"
    with progress_bar(quiet) as bar, stoppable("the same command goes on from here; finished runs are kept."):
        found = api.compare(**chosen, methods=compared, seeds=seeds, protocol=protocol, out=folder, callbacks=[bar], track=track)
    if not quiet:
        _print(found, costs is not False, view)
    if as_json:
        print_json(found.as_json())
    if found.problems:
        raise click.exceptions.Exit(BAD_INPUT)


def _require_reference(methods: Any, load: Sequence[str]) -> None:
    """Refuse to print costs if there is nothing to compare them with."""
    from polyfed.studies.compare.candidates import candidates
    from polyfed.studies.report.costs import REFERENCE
    from polyfed.trust import NOTHING, code_in

    texts = [one.text for one in candidates(methods, load, NOTHING.adding(code_in(load))).values()]
    if REFERENCE not in texts:
        raise SettingError(
            f'--costs sets methods beside {REFERENCE}, which is not among --methods. Add it: "{REFERENCE}; {texts[0]}".'
        )


def _print_estimates(
    chosen: dict[str, Any], methods: Any, seeds: int, protocol: str, as_json: bool, quiet: bool, view: View
) -> None:
    from polyfed.cli.estimating import print_estimate

    with status("Preparing data", quiet):
        from polyfed.studies.compare.compare import ComparedRuns, settings_for

        others = {name: value for name, value in chosen.items() if name not in ("data", "model")}
        settings = settings_for(chosen["data"], chosen.get("model"), protocol, others)
        runs = ComparedRuns(settings, methods, seeds=seeds, protocol=protocol)
    print_estimate(runs.runs, runs.data, as_json, quiet, view)


def _print(found: Comparison, costs: bool, view: View) -> None:
    from polyfed.studies.compare.compare import SEEN
    from polyfed.studies.report.sections import references_in
    from polyfed.tasks.metrics import MEASURES

    if found.reused:
        print(f"{found.reused} of {found.planned} runs were in {found.folder} already and are used as they are.", file=sys.stderr)
    print_warnings(found.warnings)
    about = found.data if found.protocol == SEEN else f"{found.data}, {found.protocol}: each domain unseen in turn"
    print_methods(f"{about}: {MEASURES[found.metric]} in %", found.rows, view)
    reason = found.metric_reason if found.metric != "accuracy" else ""
    in_any_case = [reason_in_short(found.metric_reason, found.metric)]
    print_footnotes(_in_short(found), [reason, found.significance, found.note], view, in_any_case)
    references = references_in(found.rows) if costs else []
    if references:
        _print_costs(found.costs, references[0].spent, view)
    print_line(f"run folders: {found.folder}")


def _in_short(found: Comparison) -> str:
    """Return what must be known of the table, in a line."""
    many = len(found.seeds)
    meaning = "± is the standard error." if many == 1 else f"± is the deviation over {many} seeds."
    if found.lead is None:
        return meaning
    low, high = (f"{100 * end:+.1f}".replace("-", "−") for end in found.lead)
    return f"Best less next: {low} to {high} (95 %). {meaning}"


def _print_costs(rows: Sequence[Expense], reference: Spent, view: View) -> None:
    from polyfed.studies.report.costs import HEADS, NOTE, REFERENCE, cells, describe_reference

    print_table(
        f"cost and privacy beside {REFERENCE}",
        ("method", *HEADS),
        [(row.method, *cells(row)) for row in rows],
        view,
        [head for head in HEADS if head != "granularity"],
        [["granularity"], ["uploaded once"], ["extra peak MB"]],
    )
    if view.explain:
        sent = [
            f"{row.method} sends: {row.data_derived_uploads} ({row.granularity or 'granularity not declared'})."
            for row in rows
            if row.data_derived_uploads
        ]
        print_footnotes("", [*sent, describe_reference(reference), NOTE], view)


def print_methods(title: str, rows: Sequence[MethodRow], view: View) -> None:
    """Print the table of methods, and why methods could not be run, each reason once."""
    print_fitted(title, _fitting(rows, console().width, view), view)
    for problem in dict.fromkeys(row.problem for row in rows if row.problem):
        say(f"{'; '.join(row.method for row in rows if row.problem == problem)} could not be run: {problem}")


def _fitting(rows: Sequence[MethodRow], width: int, view: View) -> FittedTable:
    """Return the table on one line for each method if all columns fit, else stacked if that saves the columns of domains."""
    from polyfed.studies.report.run_set import RunSet

    flat = _method_table(rows, stacked=False)
    if view.wide or not flat.left_out(width):
        return flat
    stacked = _method_table(rows, stacked=True)
    names = {column.name for column in RunSet(rows).all_columns()}
    return flat if names & set(stacked.left_out(width)) else stacked


def _method_table(rows: Sequence[MethodRow], stacked: bool) -> FittedTable:
    """Return a row for each method, the best of each column in bold; stacked, errors are below their numbers."""
    from polyfed.runs.scores import BASELINE
    from polyfed.studies.report.run_set import RunSet
    from polyfed.studies.report.words import percent

    runs = RunSet(rows)
    columns = runs.all_columns()
    best = {column: runs.best(column) for column in columns}
    costs = {"MB up": ("bytes_up", 1e6, 3), "MB down": ("bytes_down", 1e6, 3), "s": ("seconds", 1, 1)}
    cheapest = {name: runs.cheapest(what) for name, (what, _, _) in costs.items()}
    names = [column.name for column in columns]
    unseen = [name for name in names if name.startswith("unseen: ")]
    domains = [name for name in names if name not in (*MOST_IMPORTANT, *unseen)]

    def cell(text: str, bold: bool) -> Cell:
        written = text.replace(" ±", "\n±") if stacked else text
        return styled(written, "bold") if bold else written

    def score(row: MethodRow, column: Column) -> Cell:
        number = row.number(column.view, column.key)
        return "-" if number is None else cell(percent(number.value, number.error), row in best[column])

    shown: list[Row] = []
    for row in rows:
        if row.problem:
            shown.append([row.method, *("-" for _ in (*columns, *costs))])
            continue
        spent = [
            cell(f"{getattr(row, what) / unit:.{digits}f}", row in cheapest[cost]) for cost, (what, unit, digits) in costs.items()
        ]
        shown.append([row.method, *(score(row, column) for column in columns), *spent])
    by_chance = runs.baseline(columns)
    if by_chance:
        chances = [percent(by_chance[column]) if column in by_chance else "-" for column in columns]
        shown += [None, [styled(text, "dim") for text in (BASELINE, *chances, *("" for _ in costs))]]
    later = [unseen, domains, ["MB up"], ["s"], ["MB down"]]
    return FittedTable(("method", *names, *costs), shown, (*names, *costs), later)
