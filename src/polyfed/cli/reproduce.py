"""``polyfed reproduce``: a table or figure of a paper, run again, with ours beside theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.api import reproduce as reproduce_experiment
from polyfed.cli.completion import complete
from polyfed.cli.estimating import time_words
from polyfed.cli.guard import stoppable
from polyfed.cli.options import Changes, DataRoot, Explain, Json, Quiet, Wide
from polyfed.cli.output import (
    View,
    busy,
    console,
    listen,
    print_footnotes,
    print_json,
    print_table,
    progress_bar,
    status,
    table,
    warn,
)
from polyfed.errors import SettingError
from polyfed.settings import read_change

if TYPE_CHECKING:
    from polyfed.papers.grid import Form
    from polyfed.papers.reproduction import Reproduction

EXAMPLE = (
    "Examples:\n\npolyfed reproduce fedwon/table-1 --root ~/data --form laptop\n\n"
    "polyfed reproduce fedwon/table-1 --root ~/data --only FedBN --only FedWon --seeds 1\n\npolyfed reproduce --all --estimate"
)
AVERAGES = ("avg", "average", "mean", "worst", "all")
MOST = "per run: core-hours of the most expensive run; core-hours: of all runs."
NOTE = "From measured speeds of the networks on one core (docs/reproduce.md); runs that several experiments share count once."


def reproduce(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="EXPERIMENT",
            help="Such as fedwon/table-1 (polyfed ls experiments).",
            show_default=False,
            autocompletion=complete("experiments"),
        ),
    ] = None,
    root: DataRoot = None,
    form_name: Annotated[
        str,
        typer.Option(
            "--form",
            metavar="full|laptop|reduced",
            help="full: the paper's setting. laptop: about half a core-hour per run, three seeds. reduced: minutes, one seed.",
        ),
    ] = "full",
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="METHOD", help="Only this method, as the table or the text form names it; may be repeated."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="NAME", help="Only this column, as the table heads it, or this part of several; may be repeated."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=1, help="Runs of each cell; default: as the paper.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="With --estimate: all experiments.")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Train nothing: say what it would cost (core-hours).")] = False,
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Folder of runs and pages.")] = "runs/reproduce",
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="N|auto", help="Processes that train clients side by side; results stay the same."),
    ] = None,
    changes: Changes = None,
    wide: Wide = False,
    explain: Explain = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a table or figure of a paper again and print ours beside theirs; what is there already is reused."""
    from polyfed.papers.grid import Form

    settings = dict(read_change(text) for text in changes or ()) | ({} if workers is None else {"workers": workers})
    form = Form(form_name, tuple(only or ()), seeds, settings, columns=tuple(column or ()))
    if every:
        if not estimate or experiment is not None:
            raise SettingError(
                "--all is for --estimate: polyfed reproduce --all --estimate. To run experiments, name one at a time."
            )
        _estimate_all(form, as_json, quiet, View(wide, explain))
        return
    if experiment is None:
        raise SettingError("Name an experiment: polyfed reproduce fedwon/table-1. All of them: polyfed ls experiments.")
    listen(quiet)
    if estimate:
        _estimate_one(experiment, form, root, as_json, quiet, View(wide, explain))
        return
    with progress_bar(quiet) as bar, stoppable("the same command goes on from here; finished runs are kept."):
        found = reproduce_experiment(
            experiment,
            root,
            form=form_name,
            only=form.only,
            columns=form.columns,
            seeds=seeds,
            out=out,
            callbacks=[bar],
            **settings,
        )
    if not quiet:
        print_reproduction(found, View(wide, explain))
    if as_json:
        print_json(found.as_json())


def print_reproduction(found: Reproduction, view: View) -> None:
    """The paper's tables with ours, what differs, and where the page is."""
    from rich.markup import escape

    from polyfed.papers.page import LEGEND, Footnotes, analysis_sentences, sentences, shown_tables, verdicts

    out, footnotes = console(), Footnotes()
    out.print(f"[bold]{escape(found.item.paper)}, {escape(found.item.item)}: {escape(found.item.title)}[/bold]")
    for sentence in sentences(found):
        out.print(escape(sentence))
    for made in shown_tables(found, footnotes):
        shown = table(made.head, later=groups_by_importance(made.head))
        for line in made.lines:
            shown.add_row(*map(escape, line))
        print_table(made.name, shown, view)
    marks = footnotes.lines()
    print_footnotes("Each cell: published / ours (difference).", [LEGEND, *marks], view, marks)
    for sentence in [*analysis_sentences(found), *verdicts(found)]:
        out.print(escape(sentence))
    for problem in dict.fromkeys(found.problems.values()):
        warn(problem)
    out.print(f"page: {found.page} and {found.page.with_suffix('.html').name}", soft_wrap=True, markup=False)


def groups_by_importance(head: Sequence[str]) -> list[list[str]]:
    """Columns that a narrow terminal may leave out: averages are the most important, then the others from the left."""
    averages = [name for name in head[1:] if name.lower() in AVERAGES]
    return [averages, *([name] for name in head[1:] if name not in averages)]


def _estimate_all(form: Form, as_json: bool, quiet: bool, view: View) -> None:
    """What all experiments would cost, by measured speeds of their networks."""
    with busy("Looking", quiet):
        from polyfed.papers.costs import core_hours, max_core_hours
        from polyfed.papers.files import item_names, read_item
        from polyfed.papers.grid import cells_of, planned_runs

        plans = {name: planned_runs(cells_of(read_item(name), form), form) for name in item_names()}
        shared = {folder: run for runs in plans.values() for folder, run in runs.items()}
        rows = [
            (name, sum(run.seeds for run in runs.values()), max_core_hours(runs.values()), core_hours(runs.values()))
            for name, runs in plans.items()
        ]
        total = core_hours(shared.values())
    if not quiet:
        shown = table(("experiment", "runs", "per run", "core-hours"), ("runs", "per run", "core-hours"))
        for name, count, *hours in rows:
            shown.add_row(name, str(count), *("-" if each is None else f"{each:,.1f}" for each in hours))
        print_table(f"all experiments, {form.name} form", shown)
        told = "unknown" if total is None else f"{total:,.0f} core-hours"
        console().print(f"[bold]{sum(run.seeds for run in shared.values())} different runs: {told}.[/bold]")
        print_footnotes("A dash: nothing of it can be run yet.", [NOTE, MOST, "A dash: nothing of it can be run yet."], view)
    if as_json:
        items = [
            {"name": name, "runs": runs, "max_core_hours_per_run": most, "core_hours": hours} for name, runs, most, hours in rows
        ]
        print_json({"experiments": items, "core_hours": total, "form": form.name, "note": NOTE})


def _estimate_one(experiment: str, form: Form, root: str | None, as_json: bool, quiet: bool, view: View) -> None:
    """What one experiment would cost: measured on its data where they are here, else by the speed of its networks."""
    rows: list[dict[str, Any]] = []
    with status("Preparing data", quiet) as shown_status:
        from polyfed.papers.costs import estimate_item
        from polyfed.papers.files import read_item

        for one in estimate_item(read_item(experiment), form, root, shown_status.update if shown_status else lambda text: None):
            rows.append(one)
    total = sum(row["core_seconds"] for row in rows if row["core_seconds"] is not None)
    if not quiet:
        shown = table(("run", "method", "seeds", "a run", "how"), ("seeds",), [["a run"], ["seeds"], ["how"], ["method"]])
        for row in rows:
            seconds = row["core_seconds"]
            shown.add_row(
                row["run"],
                row["method"],
                str(row["seeds"]),
                "-" if seconds is None else time_words(seconds / row["seeds"], "core-"),
                row["how"],
            )
        print_table(f"{experiment}, {form.name} form: what it would cost", shown, view)
        console().print(f"[bold]{sum(row['seeds'] for row in rows)} runs: {time_words(total, 'core-')}.[/bold]")
    if as_json:
        print_json({"experiment": experiment, "form": form.name, "core_hours": total / 3600, "runs": rows})
