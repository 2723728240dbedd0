"""``polyfed evaluate``: score a run on its own data, or on other data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.api import evaluate as evaluate_run
from polyfed.cli.options import Device, Explain, Json, LoadElsewhere, ModelAgain, Quiet, Trust, Wide
from polyfed.cli.output import View, busy, console, listen, print_json, print_table, table, warn
from polyfed.cli.run import RunFolderPath, print_scores
from polyfed.settings import FACTS

if TYPE_CHECKING:
    from polyfed.runs.evaluate import Evaluation

EXAMPLE = (
    "Examples:\n\npolyfed evaluate runs/digits-mini-fedbn-seed0 --newcomer all\n\n"
    "polyfed evaluate runs/digits-mini-fedbn-seed0 my_digits/ --newcomer re-estimated"
)


def evaluate(
    path: RunFolderPath,
    data: Annotated[
        str | None,
        typer.Argument(metavar="[DATA]", help="Other data; domains the run does not know are unseen.", show_default=False),
    ] = None,
    newcomer: Annotated[
        str | None,
        typer.Option("--newcomer", help=f"Local layers of the newcomer: {', '.join(FACTS['newcomer'].choices)}, or all."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Images that seen clients are scored on: test or validation.")] = "test",
    part: Annotated[
        str | None, typer.Option("--part", help="Images of other DATA's new domains that are scored: test (default), or all.")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(
            "--root", metavar="DIR", help="Folder of the files of DATA; without DATA, of the run's own data, if they moved."
        ),
    ] = None,
    device: Device = None,
    load: LoadElsewhere = None,
    model: ModelAgain = None,
    trust: Trust = False,
    wide: Wide = False,
    explain: Explain = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a run: each seen client's own model, and the newcomer model on unseen domains."""
    listen(quiet)
    with busy("Opening the run", quiet):
        found = evaluate_run(
            path,
            data,
            newcomer=newcomer,
            split=split,
            part=part,
            root=root,
            device=device or "auto",
            load=load or None,
            model=model,
            trust=trust,
            notify=warn,
        )
    if not quiet:
        for notice in found.notices:
            warn(notice)
        _print(found, View(wide, explain))
    if as_json:
        print_json(found.summary)


def _print(found: Evaluation, view: View) -> None:
    from polyfed.core.metrics import MEASURES
    from polyfed.studies.report.run_record import domain_rows
    from polyfed.studies.report.words import percent, rounds_words

    summary, choices = found.summary, found.choices
    title = f"{summary['method']} after {rounds_words(summary['rounds'])}, on {summary['data']}"
    if len(choices) == 1:
        print_scores(summary, f"{title} (newcomer: {choices[0]})" if found.has_choice else title, view)
    else:
        print_scores(
            {**summary, "scores": [s for s in summary["scores"] if s["view"] != "unseen"]}
            if summary["accuracy"]["seen"]
            else summary,
            title,
            view,
        )
        sizes = {row.domain: row for row in domain_rows(summary) if row.view == "unseen"}
        if sizes:
            shown = table(("domain", "test images", *choices), ("test images", *choices), [["test images"]])
            for domain, row in sizes.items():
                shown.add_row(domain, str(row.count), *(percent(summary["newcomer"][choice][domain]) for choice in choices))
            console().print()
            print_table(f"newcomer on unseen domains, {MEASURES[summary['metric']]} %", shown, view)
