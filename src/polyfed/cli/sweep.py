"""``polyfed sweep``: settings searched for each method on validation data, then tested."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.api import sweep as search_methods
from polyfed.cli.guard import BAD_INPUT, stoppable
from polyfed.cli.method_table import print_methods
from polyfed.cli.options import (
    Changes,
    Data,
    Explain,
    Json,
    Methods,
    Quiet,
    Recipe,
    Trust,
    Wide,
    arguments,
    chosen_settings,
    compared_methods,
    with_settings,
)
from polyfed.cli.output import View, console, listen, print_footnotes, print_json, print_table, progress_bar, table
from polyfed.errors import SettingError
from polyfed.settings import read_change
from polyfed.text import apart

if TYPE_CHECKING:
    from polyfed.studies.sweep.search import Sweep
    from polyfed.studies.sweep.trials import Score, Searched

EXAMPLE = (
    'Examples:\n\npolyfed sweep digits-mini --methods "fedavg; fedbn" --lr 0.01,0.03,0.1\n\n'
    'polyfed sweep digits-mini --methods "fedavg; fedprox" --lr 0.01,0.1 --set-grid fedprox.mu=0.001,0.01 --trials 12 --halving --seeds 3'
)

VALIDATION = "validation: the mean over clients of the accuracy on source-validation data; no test set was read for it."

FIRST = ("methods", "lr", "set_grid", "trials", "seeds", "rounds", "batch_size", "local_epochs", "model", "root", "workers", "out")


@with_settings("data", "method", "lr", first=FIRST)
def sweep(
    values: dict[str, Any],
    methods: Methods = None,
    data: Data = None,
    lr: Annotated[str | None, typer.Option("--lr", metavar="V1,V2,...", help="Learning rates to try.")] = None,
    set_grid: Annotated[
        list[str] | None,
        typer.Option(
            "--set-grid", metavar="KEY=V1,V2,...", help="Values of a setting, or of an option (fedprox.mu); may be repeated."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            help="N trials for each method, proposed by Optuna; learning rates between those given. Default: a grid.",
        ),
    ] = None,
    sampler: Annotated[
        str, typer.Option("--sampler", help="Who proposes: tpe (learns from the trials before), or random.")
    ] = "tpe",
    halving: Annotated[
        bool,
        typer.Option("--halving", help="Stop trials that are behind early, and spend their rounds on further trials."),
    ] = False,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Final runs of the chosen settings: --seed, --seed + 1, ...")
    ] = 1,
    hold_out: Annotated[
        float | None,
        typer.Option(
            "--hold-out", metavar="SHARE", help="Share of the training data to validate on, where there is no validation part."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder of sweep.json and the runs; default: runs/sweep-<data>."),
    ] = None,
    recipe: Recipe = None,
    changes: Changes = None,
    trust: Trust = False,
    wide: Wide = False,
    explain: Explain = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search settings of each method on validation data only, with equal budgets, then test what was chosen."""
    listen(quiet)
    settings = chosen_settings(data, values, changes, recipe, trust=trust)
    search = search_of(lr, set_grid or [])
    with progress_bar(quiet) as bar, stoppable("the same command goes on from here; finished trials are kept."):
        found = search_methods(
            **arguments(settings),
            methods=compared_methods(methods, recipe),
            search=search,
            trials=trials,
            sampler=sampler,
            halving=halving,
            seeds=seeds,
            hold_out=hold_out,
            out=out,
            callbacks=[bar],
        )
    if not quiet:
        print_search(found, View(wide, explain))
        print_tests(found, View(wide, explain))
    if as_json:
        print_json(found.as_json())
    if any(one.problem for one in found.searched):
        raise typer.Exit(BAD_INPUT)


def search_of(lr: str | None, others: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """What is searched, from the command line."""
    found: dict[str, tuple[Any, ...]] = {} if lr is None else {"lr": numbers(lr)}
    for text in others:
        key, equals, written = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not written.strip():
            raise SettingError(f"--set-grid takes key=v1,v2, found {text!r}.")
        if name in found:
            raise SettingError(f"{name} is searched twice; give all its values at once.")
        pieces = apart(written)
        found[name] = tuple(literal(piece) if "." in name else read_change(f"{name}={piece}")[1] for piece in pieces)
    return found


def numbers(text: str) -> tuple[float, ...]:
    """Learning rates to try."""
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError as error:
        raise SettingError(f"--lr takes numbers apart by commas, such as 0.01,0.03,0.1, found {text!r}.") from error


def literal(text: str) -> Any:
    """The value of an option; what is no literal is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def print_search(found: Sweep, view: View) -> None:
    """Everything that was tried; the chosen ones are marked."""
    from rich.markup import escape

    from polyfed.studies.sweep.trials import edges

    names = [axis.name for axis in found.axes]
    shown = table(("method", *names, "validation %", "chosen"), (*names, "validation %"), [[name] for name in names])
    for one in found.searched:
        for place, score in enumerate(one.scores):
            method = escape(one.method) if place == 0 else ""
            shown.add_row(method, *score_cells(one, score, names), end_section=place + 1 == len(one.scores))
    kind = "grid" if found.is_grid else f"search ({found.sampler})"
    budget = f"{found.trials} trials for each method"
    if found.halving:
        budget = f"rounds of {budget}; those behind are stopped early"
    print_table(f"{found.settings.data}: {kind}, {budget}", shown, view)
    out = console()
    if view.explain:
        print_footnotes("", [VALIDATION], view)
    for one in found.searched:
        for name in edges(one, found.axes):
            out.print(f"{escape(one.method)}: the chosen {name} is at the edge of what was tried; better values may lie beyond.")


def score_cells(one: Searched, score: Score, names: Sequence[str]) -> list[str]:
    """The values of a trial, what validation said, and whether it was chosen."""
    from rich.markup import escape

    from polyfed.studies.report.words import percent
    from polyfed.studies.sweep.trials import values_words

    values = score.trial.values
    cells = [escape(values_words({name: values[name]}).partition("=")[2]) if name in values else "" for name in names]
    result = "failed" if score.validation is None else percent(score.validation)
    if score.stopped is not None:
        result += f" (round {score.stopped})"
    return [*cells, f"[bold]{result}[/bold]", "<--"] if score is one.chosen else [*cells, result, ""]


def print_tests(found: Sweep, view: View) -> None:
    """What the chosen settings reach on test data."""
    from polyfed.core.metrics import MEASURES
    from polyfed.studies.sweep.search import FILE

    out = console()
    out.print()
    print_methods(f"tests of the chosen settings: {MEASURES[found.metric]} in %", found.rows(), view)
    seeds = len(found.seeds)
    meaning = (
        f"the sample standard deviation over {seeds} seeds"
        if seeds > 1
        else "the standard error of one run from the size of its test"
    )
    whole = "" if found.hold_out is None else " What was held out in the search is trained on here."
    print_footnotes("No test set was read for the choice.", [f"± is {meaning}.{whole} Data: {found.whole.source}."], view)
    out.print(f"all trials and results: {found.folder / FILE}", soft_wrap=True, markup=False)
