"""``polyfed run`` and ``polyfed resume``: train one federation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.guard import stoppable
from polyfed.cli.options import Changes, Device, EstimateOnly, Json, LoadElsewhere, Quiet, Recipe, chosen_settings, with_settings
from polyfed.cli.output import busy, console, listen, print_json, print_table, show_progress, table, warn

if TYPE_CHECKING:
    from polyfed.result import Result
    from polyfed.settings import Settings

EXAMPLE = "Examples:\n\npolyfed run digits-mini --method fedbn --rounds 20 --unseen street\n\npolyfed run my_images/ --method 'fedbn + agc(clip=1.28)' --json"
RESUME_EXAMPLE = "Example: polyfed resume runs/digits-mini-fedbn-seed0"
LONGEST_SLUG = 60

RunFolderPath = Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")]
Root = Annotated[
    str | None,
    typer.Option("--root", metavar="DIR", help="Folder of the run's data set, or of its images, where it lies elsewhere."),
]


@with_settings("data")
def run(
    values: dict[str, Any],
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="A data set, or a folder root/<domain>/<class>/*.")] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="DIR", help="Run folder; default: runs/<data>-<method>-seed<seed>.")
    ] = None,
    recipe: Recipe = None,
    changes: Changes = None,
    estimate: EstimateOnly = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a federation, score it, and write a run folder."""
    listen(quiet)
    settings = chosen_settings(data, values, changes, recipe)
    if estimate:
        from polyfed.cli.comparing import Job
        from polyfed.cli.estimating import print_estimate

        print_estimate([Job(settings.method, settings.seed, None, settings)], as_json, quiet)
        return
    from polyfed.folder import RunFolder

    if out is not None:
        RunFolder(out).refuse_to_overwrite()
    with busy("Preparing data and model", quiet):
        from polyfed.experiment import Experiment
        from polyfed.observers import record

        experiment = Experiment(settings)
    folder = Path(out) if out is not None else free_folder(Path("runs") / default_name(experiment.settings))
    if not quiet:
        for notice in experiment.notices:
            warn(notice)
    with stoppable(f"go on with: polyfed resume {folder}"):
        result = record(experiment, RunFolder(folder), show_progress(quiet))
    report(result, as_json, quiet)


def resume(
    path: RunFolderPath,
    root: Root = None,
    device: Device = None,
    load: LoadElsewhere = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped; the end is the same as if it never had been."""
    listen(quiet)
    from polyfed.observers import resume as go_on

    with stoppable(f"go on with: polyfed resume {path}"):
        result = go_on(path, progress=show_progress(quiet), notify=warn, load=load or None, root=root, device=device)
    report(result, as_json, quiet)


def slug(text: str) -> str:
    """Text as a part of a file's name.

    >>> slug("fedbn + agc(clip=1.28)")
    'fedbn-agc-clip-1.28'
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:LONGEST_SLUG].rstrip("-.")


def data_slug(data: str) -> str:
    """The name of a data set without its options, or the last part of a folder."""
    from polyfed.build import is_folder

    return slug(Path(data).resolve().name if is_folder(data) else data.split("(")[0].replace("_", "-")) or "data"


def default_name(settings: Settings) -> str:
    """The name of a run folder."""
    return f"{data_slug(settings.data)}-{slug(settings.method)}-seed{settings.seed}"


def free_folder(wanted: Path) -> Path:
    """The folder, or the first with a number added that is free."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def report(result: Result, as_json: bool, quiet: bool) -> None:
    """Print what came out."""
    summary = result.summary()
    if not quiet:
        print_scores(summary)
        print_costs(summary)
        console().print(f"run folder: {summary['run']}", soft_wrap=True, markup=False)
    if as_json:
        print_json({**summary, "notices": result.experiment.notices})


def rounds_words(count: int) -> str:
    """So many rounds."""
    return f"{count} round{'s' * (count != 1)}"


def print_scores(summary: dict[str, Any], title: str | None = None) -> None:
    """Accuracy by domain, seen and unseen apart."""
    from rich.markup import escape

    from polyfed.report.tables import domain_rows, percent

    rows = domain_rows(summary)
    shown = table(("view", "domain", "accuracy %", "test images"), ("accuracy %", "test images"))
    several = any(row.clients > 1 for row in rows)
    if several:
        shown.add_column("clients", justify="right")
    views = [row.view for row in rows]
    for place, row in enumerate(rows):
        ends = place + 1 < len(rows) and views[place + 1] != row.view
        begins = place == 0 or views[place - 1] != row.view
        cells = [row.view if begins else "", escape(row.domain), percent(row.accuracy, row.error), str(row.count)]
        shown.add_row(*cells, *([str(row.clients)] if several else []), end_section=ends)
    print_table(title or f"{summary['method']} on {summary['data']}, {rounds_words(summary['rounds'])}", shown)
    accuracy = summary["accuracy"]
    over = "seen" if accuracy["seen"] else "unseen"
    if rows:
        console().print(
            f"over {over} domains: mean [bold]{percent(accuracy['mean'])}[/bold], worst {percent(accuracy['worst'])}, "
            f"spread {percent(accuracy['spread'])}   [dim]± is the binomial standard error of the test[/dim]"
        )


def print_costs(summary: dict[str, Any]) -> None:
    """Bytes by class of entry, and seconds."""
    from polyfed.report.byte_words import byte_words
    from polyfed.report.tables import cost_rows

    rows = cost_rows(summary)
    shown = table(("for", "class of entry", "up", "down"), ("up", "down"))
    for place, row in enumerate(rows):
        ends = place + 1 < len(rows) and rows[place + 1].purpose != row.purpose
        begins = place == 0 or rows[place - 1].purpose != row.purpose
        shown.add_row(
            row.purpose if begins else "", row.kind.replace("_", " "), byte_words(row.up), byte_words(row.down), end_section=ends
        )
    console().print()
    print_table("traffic, all clients and rounds together", shown)
    console().print(
        f"training: {byte_words(summary['bytes_up'])} up, {byte_words(summary['bytes_down'])} down, {summary['seconds']:.1f} seconds"
    )
