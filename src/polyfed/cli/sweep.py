"""``polyfed sweep``: settings searched for each method on validation data, then tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.compare import print_methods
from polyfed.cli.guard import BAD_INPUT, stoppable
from polyfed.cli.options import chosen_values, command, compared_methods, flag, settings_except, several, shared
from polyfed.cli.output import View, console, listen, print_footnotes, print_json, print_line, progress_bar, say
from polyfed.cli.tables import print_table, styled
from polyfed.errors import SettingError
from polyfed.settings import read_change
from polyfed.text import apart, literal_or_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.cli.tables import Cell, Row
    from polyfed.studies.sweep.search import Sweep
    from polyfed.studies.sweep.trials import Score, Searched

VALIDATION = "validation: the mean over clients of the accuracy on source-validation data; no test set was read for it."


@command(
    "sweep",
    'polyfed sweep digits-mini --methods "fedavg; fedbn" --lr 0.01,0.03,0.1',
    'polyfed sweep digits-mini --methods "fedavg; fedprox" --lr 0.01,0.1 --set-grid fedprox.mu=0.001,0.01 --trials 12 --halving --seeds 3',
    first=(
        "methods",
        "lr",
        "set_grid",
        "trials",
        "seeds",
        "rounds",
        "batch_size",
        "local_epochs",
        "model",
        "root",
        "workers",
        "out",
    ),
)
@shared("methods", "data")
@click.option("--lr", metavar="V1,V2,...", help="Learning rates to try.")
@several("--set-grid", metavar="KEY=V1,V2,...", help="Values of a setting, or of an option (fedprox.mu); may be repeated.")
@click.option(
    "--trials",
    metavar="N",
    type=int,
    help="N trials for each method, proposed by Optuna; learning rates between those given. Default: a grid.",
)
@click.option("--sampler", default="tpe", help="Who proposes: tpe (learns from the trials before), or random.")
@flag("--halving", help="Stop trials that are behind early, and spend their rounds on further trials.")
@click.option("--seeds", metavar="N", type=int, default=1, help="Final runs of the chosen settings: --seed, --seed + 1, ...")
@click.option(
    "--hold-out", metavar="SHARE", type=float, help="Share of the training data to validate on, where there is no validation part."
)
@click.option("--out", "-o", metavar="DIR", help="Folder of sweep.json and the runs; default: runs/sweep-<data>.")
@shared("recipe", "set", "trust", "wide", "explain", "json", "quiet")
@settings_except("data", "method", "lr")
def sweep(
    methods: str | None,
    lr: str | None,
    set_grid: Sequence[str],
    trials: int | None,
    sampler: str,
    halving: bool,
    seeds: int,
    hold_out: float | None,
    out: str | None,
    recipe: str | None,
    changes: Sequence[str],
    trust: bool,
    wide: bool,
    explain: bool,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Search settings of each method on validation data only, with equal budgets, then test what was chosen."""
    listen(quiet)
    chosen = chosen_values(values, recipe, changes, trust)
    chosen.pop("method", None)  # a recipe's own, in whose place the methods are searched
    search = _search_of(lr, set_grid)
    with progress_bar(quiet) as bar, stoppable("the same command goes on from here; finished trials are kept."):
        found = api.sweep(
            **chosen,
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
        _print_search(found, View(wide, explain))
        _print_tests(found, View(wide, explain))
    if as_json:
        print_json(found.as_json())
    if any(one.problem for one in found.searched):
        raise click.exceptions.Exit(BAD_INPUT)


def _search_of(lr: str | None, others: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return what is searched, from the command line."""
    found: dict[str, tuple[Any, ...]] = {} if lr is None else {"lr": _numbers(lr)}
    for text in others:
        key, equals, written = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not written.strip():
            raise SettingError(f"--set-grid takes key=v1,v2, found {text!r}.")
        if name in found:
            raise SettingError(f"{name} is searched twice; give all its values at once.")
        pieces = apart(written)
        found[name] = tuple(literal_or_text(piece) if "." in name else read_change(f"{name}={piece}")[1] for piece in pieces)
    return found


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError as error:
        raise SettingError(f"--lr takes numbers apart by commas, such as 0.01,0.03,0.1, found {text!r}.") from error


def _print_search(found: Sweep, view: View) -> None:
    """Print everything that was tried; the chosen ones are marked."""
    from polyfed.studies.sweep.trials import edges

    names = [axis.name for axis in found.axes]
    shown: list[Row] = []
    for one in found.searched:
        shown += [(one.method if place == 0 else "", *_score_cells(one, score, names)) for place, score in enumerate(one.scores)]
        shown.append(None)
    kind = "grid" if found.is_grid else f"search ({found.sampler})"
    budget = f"{found.trials} trials for each method"
    if found.halving:
        budget = f"rounds of {budget}; those behind are stopped early"
    numbers = (*names, "validation %")
    title = f"{found.settings.data}: {kind}, {budget}"
    print_table(title, ("method", *numbers, "chosen"), shown, view, numbers, [[name] for name in names])
    if view.explain:
        print_footnotes("", [VALIDATION], view)
    for one in found.searched:
        for name in edges(one, found.axes):
            say(f"{one.method}: the chosen {name} is at the edge of what was tried; better values may lie beyond.")


def _score_cells(one: Searched, score: Score, names: Sequence[str]) -> list[Cell]:
    """Return the values of a trial, what validation said, and whether it was chosen."""
    from polyfed.studies.report.words import percent
    from polyfed.studies.sweep.trials import format_values

    values = score.trial.values
    cells = [format_values({name: values[name]}).partition("=")[2] if name in values else "" for name in names]
    result = "failed" if score.validation is None else percent(score.validation)
    if score.stopped is not None:
        result += f" (round {score.stopped})"
    return [*cells, styled(result, "bold"), "<--"] if score is one.chosen else [*cells, result, ""]


def _print_tests(found: Sweep, view: View) -> None:
    """Print what the chosen settings reach on test data."""
    from polyfed.studies.sweep.search import FILE
    from polyfed.tasks.metrics import MEASURES

    console().print()
    print_methods(f"tests of the chosen settings: {MEASURES[found.metric]} in %", found.rows(), view)
    seeds = len(found.seeds)
    over_seeds = f"the sample standard deviation over {seeds} seeds"
    meaning = over_seeds if seeds > 1 else "the standard error of one run from the size of its test"
    whole = "" if found.hold_out is None else " What was held out in the search is trained on here."
    print_footnotes("No test set was read for the choice.", [f"± is {meaning}.{whole} Data: {found.whole.source}."], view)
    print_line(f"all trials and results: {found.folder / FILE}")
