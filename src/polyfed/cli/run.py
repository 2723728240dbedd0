"""``polyfed run`` and ``polyfed resume``: train one federation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.api import resume as go_on
from polyfed.cli.guard import stoppable
from polyfed.cli.options import (
    Changes,
    Data,
    Device,
    EstimateOnly,
    Explain,
    Json,
    LoadElsewhere,
    ModelAgain,
    Quiet,
    Recipe,
    Track,
    Trust,
    Wide,
    chosen_settings,
    with_settings,
)
from polyfed.cli.output import (
    FITTED,
    View,
    busy,
    console,
    listen,
    print_footnotes,
    print_json,
    print_table,
    print_warnings,
    progress_bar,
    reason_in_short,
    table,
    warn,
)

if TYPE_CHECKING:
    from polyfed.runs.result import Result
    from polyfed.settings import Settings

EXAMPLE = "Examples:\n\npolyfed run digits-mini --method fedbn --rounds 20 --unseen street\n\npolyfed run my_images/ --method 'fedbn + agc(clip=1.28)' --json"
RESUME_EXAMPLE = "Example: polyfed resume runs/digits-mini-fedbn-seed0"

ERROR_MEANING = "± is the standard error from the size of the test"

RunFolderPath = Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")]
Root = Annotated[
    str | None,
    typer.Option("--root", metavar="DIR", help="Folder of the run's data set, or of its images, where it lies elsewhere."),
]


FIRST = ("method", "rounds", "lr", "batch_size", "local_epochs", "model", "unseen", "seed", "root", "workers", "recipe", "out")


@with_settings("data", first=FIRST)
def run(
    values: dict[str, Any],
    data: Data = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="DIR", help="Run folder; default: runs/<data>-<method>-seed<seed>.")
    ] = None,
    recipe: Recipe = None,
    changes: Changes = None,
    trust: Trust = False,
    track: Track = None,
    estimate: EstimateOnly = False,
    wide: Wide = False,
    explain: Explain = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a federation, score it, and write a run folder."""
    listen(quiet)
    settings = chosen_settings(data, values, changes, recipe, trust=trust)
    if estimate:
        print_estimate_of(settings, as_json, quiet, View(wide, explain))
        return
    from polyfed.runs.folder.run_folder import RunFolder

    if out is not None:
        RunFolder(out).refuse_to_overwrite()
    with busy("Preparing data and model", quiet):
        from polyfed.runs.experiment import Experiment
        from polyfed.runs.folder.paths import default_name, free_folder
        from polyfed.runs.lifecycle import tracked_by, train_run

        trackers = tracked_by(track or ())
        experiment = Experiment(settings)
    folder = Path(out) if out is not None else free_folder(Path("runs") / default_name(experiment.settings))
    if not quiet:
        for notice in experiment.notices:
            warn(notice)
    with stoppable(f"go on with: polyfed resume {folder}"), progress_bar(quiet) as bar:
        result = train_run(experiment, RunFolder(folder), [*trackers, bar])
    report(result, as_json, quiet, View(wide, explain))


def resume(
    path: RunFolderPath,
    root: Root = None,
    device: Device = None,
    load: LoadElsewhere = None,
    model: ModelAgain = None,
    trust: Trust = False,
    wide: Wide = False,
    explain: Explain = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped; the end is the same as if it never had been."""
    listen(quiet)
    with stoppable(f"go on with: polyfed resume {path}"), progress_bar(quiet, message=True) as bar:
        result = go_on(
            path,
            model=model,
            load=load or None,
            root=root,
            device=device,
            trust=trust,
            progress=False,
            callbacks=[bar],
        )
    report(result, as_json, quiet, View(wide, explain))


def print_estimate_of(settings: Settings, as_json: bool, quiet: bool, view: View) -> None:
    """What one run would cost."""
    from polyfed.cli.estimating import print_estimate
    from polyfed.studies.compare.compare import ComparisonRun

    print_estimate([ComparisonRun(settings.method, settings.seed, None, settings)], settings.data, as_json, quiet, view)


def report(result: Result, as_json: bool, quiet: bool, view: View) -> None:
    """Print what came out."""
    summary = result.summary()
    if not quiet:
        print_scores(summary, view=view)
        console().print(summary["training"], markup=False, highlight=False)
        print_costs(summary)
        print_privacy(summary.get("privacy"), view)
        console().print(f"run folder: {summary['run']}", soft_wrap=True, markup=False)
    if as_json:
        print_json({**summary, "notices": result.experiment.notices})


def print_scores(summary: dict[str, Any], title: str | None = None, view: View = FITTED) -> None:
    """The headline measure by domain, with the share of the most frequent class beside every accuracy; seen and unseen apart."""
    from rich.markup import escape

    from polyfed.core.metrics import MEASURES
    from polyfed.runs.headline import BASELINE
    from polyfed.studies.report.run_record import domain_rows
    from polyfed.studies.report.words import percent, rounds_words

    print_warnings([summary["warning"]] if "warning" in summary else [])
    measure = summary["metric"]
    rows = domain_rows(summary, measure)
    has_classes = not rows or not all(math.isnan(row.majority) for row in rows)
    in_units = [] if has_classes else domain_rows(summary, "mean_absolute_error")
    beside = [*(["accuracy %"] if measure != "accuracy" else []), f"{BASELINE} %"] if has_classes else ["mean absolute error"]
    heads = [f"{MEASURES[measure]} %", *beside, "test images"]
    several = any(row.clients > 1 for row in rows)
    heads += ["clients"] if several else []
    shown = table(("view", "domain", *heads), heads, [[head] for head in heads[1:]])
    views = [row.view for row in rows]
    for place, row in enumerate(rows):
        ends = place + 1 < len(rows) and views[place + 1] != row.view
        begins = place == 0 or views[place - 1] != row.view
        cells = [row.view if begins else "", escape(row.domain), percent(row.value, row.error)]
        if has_classes:
            cells += [*([percent(row.accuracy)] if measure != "accuracy" else []), percent(row.majority)]
        else:
            cells.append(f"{in_units[place].value:.4g}")
        cells.append(str(row.count))
        shown.add_row(*cells, *([str(row.clients)] if several else []), end_section=ends)
    print_table(title or f"{summary['method']} on {summary['data']}, {rounds_words(summary['rounds'])}", shown, view)
    found = summary["headline"]
    over = "seen" if found["seen"] else "unseen"
    if rows:
        console().print(
            f"{MEASURES[measure]} over {over} domains: mean [bold]{percent(found['mean'])}[/bold], worst {percent(found['worst'])}, "
            f"spread {percent(found['spread'])}"
        )
    if "last_rounds" in summary:
        ends = summary["last_rounds"]
        console().print(
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


def print_privacy(account: dict[str, Any] | None, view: View = FITTED) -> None:
    """What was spent of a promise of privacy, by client; where all clients spent the same, in one line."""
    if account is None or not account["clients"]:
        return
    rows = account["clients"]
    if len({round(row["epsilon_spent"], 6) for row in rows.values()}) > 1:
        shown = table(
            ("client", "epsilon spent", "of", "noise multiplier", "sample rate", "steps"),
            ("epsilon spent", "of", "steps"),
            [["steps"], ["noise multiplier"], ["sample rate"]],
        )
        for name, row in rows.items():
            numbers = (row["epsilon_spent"], row["epsilon"], row["noise_multiplier"], row["sample_rate"])
            shown.add_row(name, *(f"{number:.4g}" for number in numbers), str(row["steps"]))
        print_table("privacy, by client", shown, view)
    console().print(
        f"privacy of {account['protects']}: epsilon {account['epsilon_spent']:.4g} of {account['epsilon']:g} spent at delta {account['delta']:g}; "
        f"noise at the {account['noise_at']}, from the {account['noise_from']}"
    )


def print_costs(summary: dict[str, Any]) -> None:
    """Bytes by class of entry, and seconds."""
    from polyfed.studies.report.run_record import cost_rows
    from polyfed.studies.report.words import byte_words

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
