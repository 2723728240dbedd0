"""``polyfed evaluate``: score a run on its own data, or on other data."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.options import Device, Explain, Json, LoadElsewhere, ModelAgain, Quiet, Trust, Wide
from polyfed.cli.output import View, busy, console, listen, print_json, print_table, table, warn
from polyfed.cli.run import RunFolderPath, print_scores
from polyfed.errors import SettingError, nearest
from polyfed.settings import CHOICES

if TYPE_CHECKING:
    from polyfed.core.evaluation import Row
    from polyfed.runs.experiment import Experiment

EXAMPLE = (
    "Examples:\n\npolyfed evaluate runs/digits-mini-fedbn-seed0 --newcomer all\n\n"
    "polyfed evaluate runs/digits-mini-fedbn-seed0 my_digits/ --newcomer re-estimated"
)
SPLITS, PARTS = ("test", "validation"), ("test", "all")
ALL = "all"


def evaluate(
    path: RunFolderPath,
    data: Annotated[
        str | None,
        typer.Argument(metavar="[DATA]", help="Other data; domains the run does not know are unseen.", show_default=False),
    ] = None,
    newcomer: Annotated[
        str | None, typer.Option("--newcomer", help=f"Local layers of the newcomer: {', '.join(CHOICES['newcomer'])}, or all.")
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
    choices = _checked_choices(newcomer)
    check_options(data, root, part, split)
    with busy("Opening the run", quiet):
        from polyfed.runs.other_data import use_other_tests
        from polyfed.runs.reopen import open_experiment

        experiment = open_experiment(
            path,
            own_data=data is None,
            root=root if data is None else None,
            device=device or "auto",
            load=load or None,
            model=model,
            trust=trust,
            notify=warn,
        )
        if data is not None:
            use_other_tests(experiment, data, root, part or "test", warn)
        seen = seen_rows(experiment, split)
        choices = choices or [experiment.settings.newcomer]
        unseen = {choice: newcomer_rows(experiment, choice) if split == "test" else [] for choice in choices}
    if newcomer is not None and not quiet:
        warn_if_unused(experiment, newcomer)
    summary = summary_of(experiment, path, data, split, seen, unseen)
    if not quiet:
        _print(summary, choices, experiment, View(wide, explain))
    if as_json:
        print_json(summary)


def _checked_choices(newcomer: str | None) -> list[str]:
    known = CHOICES["newcomer"]
    if newcomer is None:
        return []
    if newcomer == ALL:
        return list(known)
    if newcomer not in known:
        raise SettingError(f"--newcomer cannot be {newcomer!r}. {nearest(newcomer, (*known, ALL))}")
    return [newcomer]


def warn_if_unused(experiment: Experiment, newcomer: str) -> None:
    """Say that the choice of a newcomer changes nothing, where it does not."""
    if not experiment.federation.unseen:
        warn("There is no unseen domain, so there is no newcomer. Give other DATA, or train with --unseen.")
    if experiment.method.newcomer is not None:
        warn(f"{experiment.method} decides itself what a newcomer gets; --newcomer {newcomer} changes nothing.")


def check_options(data: str | None, root: str | None, part: str | None, split: str) -> None:
    """Refuse options that are unknown, or would change nothing."""
    from polyfed.runs.assemble import reads_files

    for name, value, known in (("split", split, SPLITS), ("part", part or "test", PARTS)):
        if value not in known:
            raise SettingError(f"--{name} cannot be {value!r}. {nearest(value, known)}")
    if data is None and part is not None:
        raise SettingError("--part is about other DATA, and none were given; of its own data the run has set aside what is tested.")
    if data is not None and split != "test":
        raise SettingError("--split validation is about the run's own data; leave DATA out, or use --part with them.")
    if data is not None and root is not None and not reads_files(data):
        raise SettingError(f"--root {root} would not be used: {data} is not read from files named here. Leave it out.")


def seen_rows(experiment: Experiment, split: str) -> list[Row]:
    """Scores of the clients' own models; clients without such images are not asked."""
    from polyfed.core import evaluation
    from polyfed.runs.experiment import threads

    if split == "test" and not any(client.tests for client in experiment.backend.data.values()):
        return []
    with threads(experiment.settings.threads):
        rows: list[Row] = experiment.talk(evaluation.seen(experiment.server, split, in_detail=True))
    return rows


def newcomer_rows(experiment: Experiment, choice: str) -> list[Row]:
    """Scores of the newcomer on every unseen domain."""
    from polyfed.runs.experiment import threads

    with threads(experiment.settings.threads):
        return [row for domain in experiment.federation.unseen for row in experiment.unseen_rows(domain, choice, in_detail=True)]


def summary_of(
    experiment: Experiment, path: str, data: str | None, split: str, seen: list[Row], unseen: dict[str, list[Row]]
) -> dict[str, Any]:
    """What was found as one JSON object; ``accuracy`` has the run's own newcomer choice, or the only one asked for."""
    from polyfed.runs.headline import domains_of, headline_by_scores, warnings
    from polyfed.runs.result import accuracy_table

    own = experiment.settings.newcomer
    shown = unseen.get(own, next(iter(unseen.values())))
    as_seen = [dataclasses.replace(row, view="seen") for row in seen]
    rows = [*seen, *shown]
    domains = domains_of([*as_seen, *shown])
    chosen = experiment.headline or headline_by_scores(experiment.settings.metric, domains)
    warned = warnings(domains, str(experiment.method))
    return {
        **({"warning": " ".join(warned)} if warned else {}),
        "run": path,
        "data": data or experiment.settings.data,
        "method": str(experiment.method),
        "rounds": experiment.server.round,
        "split": split,
        "metric": chosen.measure,
        "metric_reason": chosen.reason,
        "headline": accuracy_table([*as_seen, *shown], chosen.measure),
        "accuracy": accuracy_table([*as_seen, *shown]),
        "newcomer": {
            choice: {row.domain: row.numbers.get(chosen.measure, math.nan) for row in found} for choice, found in unseen.items()
        },
        "test_sizes": experiment.test_sizes(),
        "scored_clients": experiment.scored_sample(),
        "scores": [{"view": row.view, "client": row.client, "domain": row.domain, **row.numbers} for row in rows],
    }


def _print(summary: dict[str, Any], choices: list[str], experiment: Experiment, view: View) -> None:
    from polyfed.core.metrics import MEASURES
    from polyfed.reports.tables import domain_rows, percent, rounds_words

    title = f"{summary['method']} after {rounds_words(summary['rounds'])}, on {summary['data']}"
    if len(choices) == 1:
        chosen = experiment.federation.unseen and experiment.method.newcomer is None
        print_scores(summary, f"{title} (newcomer: {choices[0]})" if chosen else title, view)
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
