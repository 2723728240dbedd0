"""``polyfed compare``: several methods over several seeds, in one table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.api import compare as compare_methods
from polyfed.cli.estimating import print_estimate
from polyfed.cli.guard import BAD_INPUT, stoppable
from polyfed.cli.method_table import print_methods
from polyfed.cli.options import (
    Changes,
    Data,
    EstimateOnly,
    Explain,
    Json,
    Methods,
    Quiet,
    Recipe,
    Track,
    Trust,
    Wide,
    arguments,
    chosen_settings,
    compared_methods,
    with_settings,
)
from polyfed.cli.output import (
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
)
from polyfed.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.settings import Settings
    from polyfed.studies.report.comparison import Comparison
    from polyfed.studies.report.costs import Expense, Spent

EXAMPLE = (
    'Examples:\n\npolyfed compare digits-mini --methods "fedavg; fedbn; fedavg + group_norm" --seeds 3\n\n'
    'polyfed compare digits-mini --methods "fedavg; fedwon with lr=0.2, schedule=cosine"\n\n'
    'polyfed compare digits-mini --methods "fedavg; fedbn" --protocol leave-one-out'
)


FIRST = ("methods", "seeds", "protocol", "rounds", "lr", "batch_size", "local_epochs", "model", "root", "workers", "recipe", "out")


@with_settings("data", "method", first=FIRST)
def compare(
    values: dict[str, Any],
    methods: Methods = None,
    data: Data = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Seeds for each method: --seed, --seed + 1, ...")] = 1,
    protocol: Annotated[str, typer.Option("--protocol", help="seen, or leave-one-out: every domain unseen in turn.")] = "seen",
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="DIR", help="Folder of the run folders; default: runs/compare-<data>.")
    ] = None,
    recipe: Recipe = None,
    changes: Changes = None,
    trust: Trust = False,
    track: Track = None,
    costs: Annotated[
        bool | None,
        typer.Option(
            "--costs/--no-costs",
            help="Print what leaves clients, and extra bytes, CPU seconds and memory beside fedavg; default: where fedavg is compared.",
            show_default=False,
        ),
    ] = None,
    estimate: EstimateOnly = False,
    wide: Wide = False,
    explain: Explain = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods and compare them in one table; runs that are there already are reused."""
    from polyfed.runs.folder.paths import data_slug
    from polyfed.studies.compare.compare import LEAVE_ONE_OUT, LEAVE_ONE_OUT_DEFAULTS

    listen(quiet)
    view = View(wide, explain)
    settings = chosen_settings(data, values, changes, recipe, LEAVE_ONE_OUT_DEFAULTS if protocol == LEAVE_ONE_OUT else {}, trust)
    compared = compared_methods(methods, recipe)
    if costs:
        require_reference(compared, settings)
    if estimate:
        print_estimates(settings, compared, seeds, protocol, as_json, quiet, view)
        return
    folder = Path(out) if out is not None else Path("runs") / f"compare-{data_slug(settings.data)}"
    with progress_bar(quiet) as bar, stoppable("the same command goes on from here; finished runs are kept."):
        found = compare_methods(
            **arguments(settings),
            methods=compared,
            seeds=seeds,
            protocol=protocol,
            out=folder,
            callbacks=[bar],
            track=track or (),
        )
    if not quiet:
        print_comparison(found, costs is not False, view)
    if as_json:
        print_json(found.as_json())
    if found.problems:
        raise typer.Exit(BAD_INPUT)


def require_reference(methods: Any, settings: Settings) -> None:
    """Refuse to print costs where there is nothing to set them beside."""
    from polyfed.studies.compare.candidates import candidates
    from polyfed.studies.report.costs import REFERENCE

    texts = [one.text for one in candidates(methods, settings.load, settings.trust).values()]
    if REFERENCE not in texts:
        raise SettingError(
            f'--costs sets methods beside {REFERENCE}, which is not among --methods. Add it: "{REFERENCE}; {texts[0]}".'
        )


def print_estimates(settings: Settings, methods: Any, seeds: int, protocol: str, as_json: bool, quiet: bool, view: View) -> None:
    """What the comparison would cost."""
    from polyfed.studies.compare.compare import ComparedRuns

    with busy("Preparing data", quiet):
        runs = ComparedRuns(settings, methods, seeds=seeds, protocol=protocol)
    print_estimate(runs.runs, runs.data, as_json, quiet, view)


def print_comparison(found: Comparison, costs: bool, view: View) -> None:
    """The tables and their footnotes."""
    from polyfed.core.metrics import MEASURES
    from polyfed.studies.compare.compare import SEEN
    from polyfed.studies.report.sections import references_in

    if found.reused:
        print(f"{found.reused} of {found.planned} runs were in {found.folder} already and are used as they are.", file=sys.stderr)
    print_warnings(found.warnings)
    about = found.data if found.protocol == SEEN else f"{found.data}, {found.protocol}: each domain unseen in turn"
    print_methods(f"{about}: {MEASURES[found.metric]} in %", found.rows, view)
    reason = found.metric_reason if found.metric != "accuracy" else ""
    print_footnotes(
        in_short(found), [reason, found.certainty, found.note], view, [reason_in_short(found.metric_reason, found.metric)]
    )
    references = references_in(found.rows) if costs else []
    if references:
        print_costs(found.costs, references[0].spent, view)
    console().print(f"run folders: {found.folder}", soft_wrap=True, markup=False)


def in_short(found: Comparison) -> str:
    """What must be known of the table, in a line."""
    many = len(found.seeds)
    meaning = "± is the standard error." if many == 1 else f"± is the deviation over {many} seeds."
    if found.lead is None:
        return meaning
    low, high = (f"{100 * end:+.1f}".replace("-", "−") for end in found.lead)
    return f"Best less next: {low} to {high} (95 %). {meaning}"


def print_costs(rows: Sequence[Expense], reference: Spent, view: View) -> None:
    """The second table: cost and privacy beside the reference."""
    from rich.markup import escape

    from polyfed.studies.report.costs import HEADS, NOTE, REFERENCE, cells, reference_words

    later = [["granularity"], ["left once"], ["extra peak MB"]]
    shown = table(("method", *HEADS), [head for head in HEADS if head != "granularity"], later)
    for row in rows:
        shown.add_row(escape(row.method), *cells(row))
    print_table(f"cost and privacy beside {REFERENCE}", shown, view)
    if view.explain:
        senders = [row for row in rows if row.data_derived_uploads]
        sent = [
            f"{row.method} sends: {row.data_derived_uploads} ({row.granularity or 'granularity not declared'})." for row in senders
        ]
        print_footnotes("", [*sent, reference_words(reference), NOTE], view)
