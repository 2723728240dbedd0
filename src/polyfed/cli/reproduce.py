"""``polyfed reproduce``: a table or figure from a paper, with published and measured numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.completion import complete
from polyfed.cli.estimating import format_time
from polyfed.cli.guard import stoppable
from polyfed.cli.options import argument, command, flag, repeatable, shared
from polyfed.cli.output import (
    View,
    console,
    log_to_stderr,
    print_footnotes,
    print_json,
    print_line,
    print_text,
    progress_bar,
    status,
    warn,
)
from polyfed.cli.tables import print_table
from polyfed.errors import SettingError
from polyfed.settings import read_change

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from polyfed.papers.reproduction import Reproduction

AVERAGES = ("avg", "average", "mean", "worst", "all")
PER_RUN_NOTE = "per run: core-hours of the most expensive run; core-hours: total of all runs."
NOTE = "Computed from the measured speed of the networks on one core (docs/reproduce.md). Runs shared by several experiments count once."
DASH_NOTE = "A dash marks experiments that cannot be run yet."


@command(
    "reproduce",
    "polyfed reproduce fedwon/table-1 --root ~/data --form laptop",
    "polyfed reproduce fedwon/table-1 --root ~/data --only FedBN --only FedWon --seeds 1",
    "polyfed reproduce --all --estimate",
)
@argument(
    "experiment",
    "EXPERIMENT",
    "Experiment, such as fedwon/table-1 (polyfed ls experiments).",
    required=False,
    shell_complete=complete("experiments"),
)
@shared("data root")
@click.option(
    "--form",
    metavar="full|laptop|reduced",
    default="full",
    help="full: as in the paper. laptop: about half a core-hour per run, three seeds. reduced: a few minutes, one seed.",
)
@repeatable("--only", metavar="METHOD", help="Run only this method (name in the table, or expression); repeatable.")
@repeatable("--column", "columns", metavar="NAME", help="Run only this column or part of the table; repeatable.")
@click.option("--seeds", metavar="N", type=click.IntRange(min=1), help="Number of runs per cell. Default: as in the paper.")
@flag("--all", "every", help="Estimate all experiments (with --estimate).")
@flag("--estimate", help="Estimate the cost in core-hours, without training.")
@click.option("--out", "-o", metavar="DIR", default="runs/reproduce", help="Folder for runs and pages.")
@click.option(
    "--workers", metavar="N|auto", help="Number of processes that train clients in parallel. The results do not depend on it."
)
@shared("set", "wide", "explain", "json", "quiet")
def reproduce(
    experiment: str | None,
    every: bool,
    estimate: bool,
    out: str,
    workers: str | None,
    changes: Sequence[str],
    wide: bool,
    explain: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Reproduce a table or figure from a paper and compare it with the published numbers. Existing runs are reused."""
    options |= dict(map(read_change, changes)) | ({} if workers is None else {"workers": workers})
    view = View(wide, explain)
    if every and (not estimate or experiment is not None):
        raise SettingError("--all requires --estimate, without an experiment: polyfed reproduce --all --estimate.")
    if experiment is None and not every:
        raise SettingError("EXPERIMENT is missing. Pass one, such as fedwon/table-1 (polyfed ls experiments lists all).")
    log_to_stderr(quiet)
    if estimate:
        _estimate(experiment, options, as_json, quiet, view)
        return
    with progress_bar(quiet) as bar, stoppable("Run the same command again to resume; finished runs are kept."):
        found = api.reproduce(str(experiment), out=out, callbacks=[bar], **options)
    if not quiet:
        _print(found, view)
    if as_json:
        print_json(found.as_json())


def _print(found: Reproduction, view: View) -> None:
    """Print the paper's tables with the measured numbers, the differences, and the path of the page."""
    from polyfed.papers.page import LEGEND, Footnotes, analysis_sentences, sentences, shown_tables, verdicts

    footnotes = Footnotes()
    console().print(f"{found.item.paper}, {found.item.item}: {found.item.title}", style="bold", markup=False)
    for sentence in sentences(found):
        print_text(sentence)
    for table in shown_tables(found, footnotes):
        averages = [name for name in table.head[1:] if name.lower() in AVERAGES]
        others = [[name] for name in table.head[1:] if name not in averages]
        print_table(table.name, table.head, table.lines, view, optional=[averages, *others])
    marks = footnotes.lines()
    print_footnotes("Each cell: published / ours (difference).", [LEGEND, *marks], view, marks)
    for sentence in [*analysis_sentences(found), *verdicts(found)]:
        print_text(sentence)
    for problem in dict.fromkeys(found.problems.values()):
        warn(problem)
    print_line(f"page: {found.page} and {found.page.with_suffix('.html').name}")


def _estimate(experiment: str | None, options: dict[str, Any], as_json: bool, quiet: bool, view: View) -> None:
    with status("Estimating", quiet) as shown:
        found = api.estimate_reproduction(experiment, notify=shown.update if shown else None, **options)
    if not quiet:
        (_print_all if experiment is None else _print_one)(found, view)
    if as_json:
        print_json({**found, "note": NOTE} if experiment is None else found)


def _print_all(found: Mapping[str, Any], view: View) -> None:
    columns = ("experiment", "runs", "per run", "core-hours")
    cells = [
        (str(name), str(runs), *("-" if each is None else f"{each:,.1f}" for each in hours))
        for name, runs, *hours in (row.values() for row in found["experiments"])
    ]
    print_table(f"all experiments, {found['form']} form", columns, cells, numbers=columns[1:])
    total = "unknown" if found["core_hours"] is None else f"{found['core_hours']:,.0f} core-hours"
    console().print(f"[bold]{found['runs']} different runs: {total}.[/bold]")
    print_footnotes(DASH_NOTE, [NOTE, PER_RUN_NOTE, DASH_NOTE], view)


def _print_one(found: Mapping[str, Any], view: View) -> None:
    rows = []
    for row in found["runs"]:
        per_run = "-" if row["core_seconds"] is None else format_time(row["core_seconds"] / row["seeds"], "core-")
        rows.append((row["run"], row["method"], str(row["seeds"]), per_run, row["how"]))
    title = f"{found['experiment']}, {found['form']} form: estimated cost"
    optional = [["per run"], ["seeds"], ["source"], ["method"]]
    print_table(title, ("run", "method", "seeds", "per run", "source"), rows, view, ("seeds",), optional)
    total = format_time(3600 * found["core_hours"], "core-")
    console().print(f"[bold]{sum(row['seeds'] for row in found['runs'])} runs: {total}.[/bold]")
