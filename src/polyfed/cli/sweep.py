"""``polyfed sweep``: hyperparameter search on validation data, then a test of the best settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from polyfed import api
from polyfed.cli.compare import print_methods
from polyfed.cli.guard import BAD_INPUT, stoppable
from polyfed.cli.options import command, flag, repeatable, resolve_methods, resolve_values, settings_except, shared
from polyfed.cli.output import View, console, log_to_stderr, print_footnotes, print_json, print_line, print_text, progress_bar
from polyfed.cli.tables import print_table, styled
from polyfed.errors import SettingError
from polyfed.settings import read_change
from polyfed.text import literal_or_text, split_outside_brackets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyfed.cli.tables import Cell, Row
    from polyfed.studies.sweep.search import Sweep
    from polyfed.studies.sweep.trials import Score, Searched


@command(
    "sweep",
    'polyfed sweep digits-mini --methods "fedavg; fedbn" --lr 0.01,0.03,0.1',
    'polyfed sweep digits-mini --methods "fedavg; fedprox" --lr 0.01,0.1 --set-grid fedprox.mu=0.001,0.01 --trials 12 --halving --seeds 3',
    first=(
        *("methods", "lr", "set_grid", "trials", "seeds", "rounds"),
        *("batch_size", "local_epochs", "model", "root", "workers", "out"),
    ),
)
@shared("methods", "data")
@click.option("--lr", metavar="V1,V2,...", help="Learning rates to try, separated by commas.")
@repeatable("--set-grid", metavar="KEY=V1,V2,...", help="Values to try for a setting or a method option (fedprox.mu); repeatable.")
@click.option(
    "--trials",
    metavar="N",
    type=int,
    help="Number of trials per method, proposed by Optuna, with learning rates from the range of --lr. Default: full grid.",
)
@click.option("--sampler", default="tpe", help="Optuna sampler: tpe (learns from earlier trials), or random.")
@flag("--halving", help="Use successive halving: stop weak trials early, and spend their rounds on more trials.")
@click.option(
    "--seeds", metavar="N", type=int, default=1, help="Number of final runs with the best settings: --seed, --seed + 1, ..."
)
@click.option(
    "--hold-out",
    metavar="FRACTION",
    type=float,
    help="Fraction of the training data for validation, if there is no validation split.",
)
@click.option("--out", "-o", metavar="DIR", help="Folder for sweep.json and all runs. Default: runs/sweep-<data>.")
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
    wide: bool,
    explain: bool,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    """Tune each method on validation data with the same budget, then test the best settings."""
    log_to_stderr(quiet)
    chosen = resolve_values(**values)
    chosen.pop("method", None)  # the method of the recipe, replaced by the tuned methods
    with progress_bar(quiet) as bar, stoppable("Run the same command again to resume; finished trials are kept."):
        found = api.sweep(
            **chosen,
            methods=resolve_methods(methods, values["recipe"]),
            search=_parse_search(lr, set_grid),
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
    if any(searched.problem for searched in found.searched):
        raise click.exceptions.Exit(BAD_INPUT)


def _parse_search(lr: str | None, others: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    search: dict[str, tuple[Any, ...]] = {}
    if lr is not None:
        try:
            search["lr"] = tuple(float(number) for number in lr.split(","))
        except ValueError as error:
            raise SettingError(f"--lr must be a comma-separated list of numbers, such as 0.01,0.03,0.1; got {lr!r}.") from error
    for text in others:
        key, equals, written = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not written.strip():
            raise SettingError(f"--set-grid must be key=v1,v2, got {text!r}.")
        if name in search:
            raise SettingError(f"{name} is given twice. Pass all its values in one option.")
        values = split_outside_brackets(written)
        search[name] = tuple(literal_or_text(value) if "." in name else read_change(f"{name}={value}")[1] for value in values)
    return search


def _print_search(found: Sweep, view: View) -> None:
    """Print all trials and mark the best ones."""
    from polyfed.studies.sweep.trials import edges

    names = [axis.name for axis in found.axes]
    shown: list[Row] = []
    for searched in found.searched:
        labels = (searched.method, *[""] * len(searched.scores))
        shown += [(label, *_score_cells(searched, score, names)) for label, score in zip(labels, searched.scores, strict=False)]
        shown.append(None)
    kind = "grid" if found.is_grid else f"search ({found.sampler})"
    budget = f"{found.trials} trial{'s' * (found.trials != 1)} per method"
    if found.halving:
        budget = f"rounds of {budget}; weak trials are stopped early"
    from polyfed.tasks.metrics import MEASURES

    measure = MEASURES[found.metric]
    numbers = (*names, "validation %")
    title = f"{found.settings.data}: {kind}, {budget}, chosen by {measure}"
    print_table(title, ("method", *numbers, "chosen"), shown, view, numbers, [[name] for name in names])
    if view.explain:
        note = f"validation: mean {measure} of the training clients on validation data; test data is not read."
        print_footnotes("", [found.metric_reason, note], view)
    for searched in found.searched:
        for name in edges(searched, found.axes):
            print_text(f"{searched.method}: the best {name} is at the edge of the search range. Consider a wider range.")


def _score_cells(searched: Searched, score: Score, names: Sequence[str]) -> list[Cell]:
    """Return the values of a trial, its validation score, and a mark if it is the best."""
    from polyfed.studies.report.words import percent
    from polyfed.studies.sweep.trials import format_values

    values = score.trial.values
    cells = [format_values({name: values[name]}).partition("=")[2] if name in values else "" for name in names]
    result = "failed" if score.validation is None else percent(score.validation)
    if score.stopped is not None:
        result += f" (round {score.stopped})"
    return [*cells, styled(result, "bold"), "<--"] if score is searched.chosen else [*cells, result, ""]


def _print_tests(found: Sweep, view: View) -> None:
    from polyfed.studies.sweep.search import FILE
    from polyfed.tasks.metrics import MEASURES

    console().print()
    print_methods(f"test results of the best settings: {MEASURES[found.metric]} in %", found.tests, view)
    seeds = len(found.seeds)
    error = f"sample standard deviation over {seeds} seeds" if seeds > 1 else "standard error of one run"
    hold_out = "" if found.hold_out is None else " These runs also train on the data that the search held out."
    summaries = [verdict.summary for verdict in found.verdicts if verdict.summary]
    explained = [found.significance, f"± is the {error}.{hold_out} Data: {found.whole.source}."]
    print_footnotes(" ".join([*summaries, "The search did not read test data."]), explained, view)
    print_line(f"all trials and results: {found.folder / FILE}")
