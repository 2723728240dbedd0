"""``polyfed reproduce``: a table or figure of a paper, run again, with ours beside theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.completion import complete
from polyfed.cli.estimating import time_words
from polyfed.cli.guard import stoppable
from polyfed.cli.options import argument, command, flag, several, shared
from polyfed.cli.output import View, console, listen, print_footnotes, print_json, print_line, progress_bar, say, status, warn
from polyfed.cli.tables import print_table
from polyfed.errors import SettingError
from polyfed.settings import read_change

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.papers.grid import Form
    from polyfed.papers.reproduction import Reproduction

AVERAGES = ("avg", "average", "mean", "worst", "all")
MOST = "per run: core-hours of the most expensive run; core-hours: of all runs."
NOTE = "From measured speeds of the networks on one core (docs/reproduce.md); runs that several experiments share count once."
DASH = "A dash: nothing of it can be run yet."


@command(
    "reproduce",
    "polyfed reproduce fedwon/table-1 --root ~/data --form laptop",
    "polyfed reproduce fedwon/table-1 --root ~/data --only FedBN --only FedWon --seeds 1",
    "polyfed reproduce --all --estimate",
)
@argument(
    "experiment",
    "EXPERIMENT",
    "Such as fedwon/table-1 (polyfed ls experiments).",
    required=False,
    shell_complete=complete("experiments"),
)
@shared("data root")
@click.option(
    "--form",
    "form_name",
    metavar="full|laptop|reduced",
    default="full",
    help="full: the paper's setting. laptop: about half a core-hour per run, three seeds. reduced: minutes, one seed.",
)
@several("--only", metavar="METHOD", help="Only this method, as the table or the text form names it; may be repeated.")
@several("--column", metavar="NAME", help="Only this column, as the table heads it, or this part of several; may be repeated.")
@click.option("--seeds", metavar="N", type=click.IntRange(min=1), help="Runs of each cell; default: as the paper.")
@flag("--all", "every", help="With --estimate: all experiments.")
@flag("--estimate", help="Train nothing: say what it would cost (core-hours).")
@click.option("--out", "-o", metavar="DIR", default="runs/reproduce", help="Folder of runs and pages.")
@click.option("--workers", metavar="N|auto", help="Processes that train clients side by side; results stay the same.")
@shared("set", "wide", "explain", "json", "quiet")
def reproduce(
    experiment: str | None,
    root: str | None,
    form_name: str,
    only: Sequence[str],
    column: Sequence[str],
    seeds: int | None,
    every: bool,
    estimate: bool,
    out: str,
    workers: str | None,
    changes: Sequence[str],
    wide: bool,
    explain: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a table or figure of a paper again and print ours beside theirs; what is there already is reused."""
    from polyfed.papers.grid import Form

    settings = dict(read_change(text) for text in changes) | ({} if workers is None else {"workers": workers})
    form = Form(form_name, tuple(only), seeds, settings, columns=tuple(column))
    view = View(wide, explain)
    if every:
        if not estimate or experiment is not None:
            raise SettingError(
                "--all is for --estimate: polyfed reproduce --all --estimate. To run experiments, name one at a time."
            )
        _estimate_all(form, as_json, quiet, view)
        return
    if experiment is None:
        raise SettingError("Name an experiment: polyfed reproduce fedwon/table-1. All of them: polyfed ls experiments.")
    listen(quiet)
    if estimate:
        _estimate_one(experiment, form, root, as_json, quiet, view)
        return
    with progress_bar(quiet) as bar, stoppable("the same command goes on from here; finished runs are kept."):
        found = api.reproduce(
            experiment, root, form=form_name, only=only, columns=column, seeds=seeds, out=out, callbacks=[bar], **settings
        )
    if not quiet:
        _print(found, view)
    if as_json:
        print_json(found.as_json())


def _print(found: Reproduction, view: View) -> None:
    """Print the paper's tables with ours, what differs, and where the page is."""
    from polyfed.papers.page import LEGEND, Footnotes, analysis_sentences, sentences, shown_tables, verdicts

    footnotes = Footnotes()
    console().print(f"{found.item.paper}, {found.item.item}: {found.item.title}", style="bold", markup=False)
    for sentence in sentences(found):
        say(sentence)
    for made in shown_tables(found, footnotes):
        print_table(made.name, made.head, made.lines, view, later=_by_importance(made.head))
    marks = footnotes.lines()
    print_footnotes("Each cell: published / ours (difference).", [LEGEND, *marks], view, marks)
    for sentence in [*analysis_sentences(found), *verdicts(found)]:
        say(sentence)
    for problem in dict.fromkeys(found.problems.values()):
        warn(problem)
    print_line(f"page: {found.page} and {found.page.with_suffix('.html').name}")


def _by_importance(head: Sequence[str]) -> list[list[str]]:
    """Return the columns that a narrow terminal may leave out: averages are the most important, then the others from the left."""
    averages = [name for name in head[1:] if name.lower() in AVERAGES]
    return [averages, *([name] for name in head[1:] if name not in averages)]


def _estimate_all(form: Form, as_json: bool, quiet: bool, view: View) -> None:
    """Print what all experiments would cost, by measured speeds of their networks."""
    with status("Looking", quiet):
        from polyfed.papers.costs import core_hours, max_core_hours
        from polyfed.papers.files import item_names, read_item
        from polyfed.papers.grid import cells_of, planned_runs

        plans = {name: planned_runs(cells_of(read_item(name), form), form) for name in item_names()}
        shared_runs = {folder: run for runs in plans.values() for folder, run in runs.items()}
        rows = [
            {
                "name": name,
                "runs": sum(run.seeds for run in runs.values()),
                "max_core_hours_per_run": max_core_hours(runs.values()),
                "core_hours": core_hours(runs.values()),
            }
            for name, runs in plans.items()
        ]
        total = core_hours(shared_runs.values())
    if not quiet:
        columns = ("experiment", "runs", "per run", "core-hours")
        cells = [
            (str(name), str(runs), *("-" if each is None else f"{each:,.1f}" for each in hours))
            for name, runs, *hours in (row.values() for row in rows)
        ]
        print_table(f"all experiments, {form.name} form", columns, cells, numbers=columns[1:])
        told = "unknown" if total is None else f"{total:,.0f} core-hours"
        console().print(f"[bold]{sum(run.seeds for run in shared_runs.values())} different runs: {told}.[/bold]")
        print_footnotes(DASH, [NOTE, MOST, DASH], view)
    if as_json:
        print_json({"experiments": rows, "core_hours": total, "form": form.name, "note": NOTE})


def _estimate_one(experiment: str, form: Form, root: str | None, as_json: bool, quiet: bool, view: View) -> None:
    """Print what one experiment would cost: measured on its data if they are here, else by the speed of its networks."""
    with status("Preparing data", quiet) as shown:
        from polyfed.papers.costs import estimate_item
        from polyfed.papers.files import read_item

        rows = list(estimate_item(read_item(experiment), form, root, shown.update if shown else lambda text: None))
    total = sum(row["core_seconds"] for row in rows if row["core_seconds"] is not None)
    if not quiet:
        print_table(
            f"{experiment}, {form.name} form: what it would cost",
            ("run", "method", "seeds", "a run", "how"),
            [(row["run"], row["method"], str(row["seeds"]), _per_run(row), row["how"]) for row in rows],
            view,
            ("seeds",),
            [["a run"], ["seeds"], ["how"], ["method"]],
        )
        console().print(f"[bold]{sum(row['seeds'] for row in rows)} runs: {time_words(total, 'core-')}.[/bold]")
    if as_json:
        print_json({"experiment": experiment, "form": form.name, "core_hours": total / 3600, "runs": rows})


def _per_run(row: dict[str, Any]) -> str:
    return "-" if row["core_seconds"] is None else time_words(row["core_seconds"] / row["seeds"], "core-")
