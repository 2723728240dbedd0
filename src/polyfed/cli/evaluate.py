"""``polyfed evaluate``: an evaluation of a run on its own or other data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.options import REOPEN_OPTIONS, argument, command, shared
from polyfed.cli.output import View, console, log_to_stderr, print_json, status, warn
from polyfed.cli.run import print_scores
from polyfed.cli.tables import print_table
from polyfed.settings import FACTS

if TYPE_CHECKING:
    from polyfed.runs.evaluate import Evaluation


@command(
    "evaluate",
    "polyfed evaluate runs/digits-mini-fedbn-seed0 --newcomer all",
    "polyfed evaluate runs/digits-mini-fedbn-seed0 my_digits/ --newcomer re-estimated",
)
@shared("run")
@argument("data", "[DATA]", "Other data to evaluate on. Domains that are new to the run count as unseen.", required=False)
@click.option("--newcomer", help=f"How to build the local layers of a newcomer: {', '.join(FACTS['newcomer'].choices)}, or all.")
@click.option("--split", default="test", help="Split to evaluate seen clients on: test or validation.")
@click.option("--part", help="Split of the new domains in DATA to evaluate on: test (default) or all.")
@click.option("--root", metavar="DIR", help="Folder with the files of DATA. Without DATA: the run's data folder, if it has moved.")
@shared(*REOPEN_OPTIONS, "wide", "explain", "json", "quiet")
def evaluate(path: str, data: str | None, wide: bool, explain: bool, as_json: bool, quiet: bool, **how: Any) -> None:
    """Evaluate each client's model on its own domain, and the newcomer model on unseen domains."""
    log_to_stderr(quiet)
    with status("Opening the run", quiet):
        found = api.evaluate(path, data, notify=warn, **how)
    if not quiet:
        for notice in found.notices:
            warn(notice)
        _print(found, View(wide, explain))
    if as_json:
        print_json(found.summary)


def _print(found: Evaluation, view: View) -> None:
    from polyfed.studies.report.run_record import domain_rows
    from polyfed.studies.report.words import percent, rounds_words
    from polyfed.tasks.metrics import MEASURES

    summary, choices = found.summary, found.choices
    rounds = rounds_words(summary["rounds"])
    title = f"{summary['method']} after {rounds}, on {summary['data']}"
    if len(choices) == 1:
        print_scores(summary, f"{title} (newcomer: {choices[0]})" if found.has_choice else title, view)
        return
    seen = {**summary, "scores": [score for score in summary["scores"] if score["view"] != "unseen"]}
    print_scores(seen if summary["accuracy"]["seen"] else summary, title, view)
    unseen = [row for row in domain_rows(summary) if row.view == "unseen"]
    if unseen:
        columns = ("test images", *choices)
        rows = [
            (row.domain, str(row.count), *(percent(summary["newcomer"][choice][row.domain]) for choice in choices))
            for row in unseen
        ]
        console().print()
        title = f"newcomer on unseen domains, {MEASURES[summary['metric']]} %"
        print_table(title, ("domain", *columns), rows, view, columns, [["test images"]])
