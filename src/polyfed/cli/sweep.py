"""``polyfed sweep``: settings searched for each method on validation data, then tested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.guard import BAD_INPUT, stoppable
from polyfed.cli.options import Changes, Json, Quiet, Recipe, chosen_settings, read_change, with_settings
from polyfed.cli.output import busy, console, listen, print_json, print_table, table
from polyfed.cli.runs_bar import runs_bar
from polyfed.errors import SettingError

if TYPE_CHECKING:
    from polyfed.report.tables import MethodRow
    from polyfed.sweeps.search import Sweep
    from polyfed.sweeps.space import Axis
    from polyfed.sweeps.trials import Searched

EXAMPLE = (
    'Examples:\n\npolyfed sweep digits-mini --methods "fedavg; fedbn" --lr 0.01,0.03,0.1\n\n'
    'polyfed sweep digits-mini --methods "fedavg; fedprox" --lr 0.01,0.1 --set-grid fedprox.mu=0.001,0.01 --random 8 --seeds 3'
)


@with_settings("data", "method", "lr")
def sweep(
    values: dict[str, Any],
    methods: Annotated[str, typer.Option("--methods", metavar="TEXTS", help="Methods, apart by semicolons.")],
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="A data set, or a folder root/<domain>/<class>/*.")] = None,
    lr: Annotated[str | None, typer.Option("--lr", metavar="V1,V2,...", help="Learning rates to try.")] = None,
    set_grid: Annotated[
        list[str] | None,
        typer.Option(
            "--set-grid", metavar="KEY=V1,V2,...", help="Values of a setting, or of an option (fedprox.mu); may be repeated."
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(
            "--random", metavar="N", help="N random trials for each method; learning rates log-uniform between those given."
        ),
    ] = None,
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
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search settings of each method on validation data only, with equal budgets, then test what was chosen."""
    from polyfed.cli.compare import method_texts
    from polyfed.cli.run import data_slug

    listen(quiet)
    settings = chosen_settings(data, values, changes, recipe)
    if seeds < 1:
        raise SettingError(f"--seeds must be at least 1, found {seeds}.")
    texts = method_texts(methods, settings)
    axes = axes_of(lr, set_grid or [])
    folder = Path(out) if out is not None else Path("runs") / f"sweep-{data_slug(settings.data)}"
    with runs_bar(quiet) as bar:
        with busy("Preparing data", quiet):
            from polyfed.cli.sweep_watch import SweepWatch
            from polyfed.sweeps.search import Sweep

            watch = SweepWatch(bar, quiet)
            searching = Sweep(settings, texts, axes, folder, random=random, seeds=seeds, hold_out=hold_out, watch=watch)
        with stoppable("the same command goes on from here; finished trials are kept."):
            found = searching.run()
    rows = [row_of(one) for one in found]
    if not quiet:
        print_search(searching)
        print_tests(searching, rows)
    if as_json:
        from polyfed.cli.compare import row_told

        print_json({**searching.document(), "tests": [row_told(row) for row in rows], "out": str(folder)})
    if any(one.problem for one in found):
        raise typer.Exit(BAD_INPUT)


def axes_of(lr: str | None, others: Sequence[str]) -> list[Axis]:
    """What is searched, from the command line."""
    from polyfed.sweeps.space import Axis

    found = [] if lr is None else [Axis("lr", numbers(lr))]
    for text in others:
        key, equals, written = text.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not written.strip():
            raise SettingError(f"--set-grid takes key=v1,v2, found {text!r}.")
        pieces = apart(written)
        if "." in name:
            found.append(Axis(name, tuple(literal(piece) for piece in pieces)))
        else:
            found.append(Axis(name, tuple(read_change(f"{name}={piece}")[1] for piece in pieces)))
    return found


def numbers(text: str) -> tuple[float, ...]:
    """Learning rates to try."""
    try:
        return tuple(float(piece) for piece in text.split(","))
    except ValueError as error:
        raise SettingError(f"--lr takes numbers apart by commas, such as 0.01,0.03,0.1, found {text!r}.") from error


def literal(text: str) -> Any:
    """The value of an option; what is no literal is text."""
    import ast

    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def apart(text: str) -> list[str]:
    """Pieces between commas that are in no brackets.

    >>> apart("constant, steps(at=(0.5, 0.75)), cosine")
    ['constant', 'steps(at=(0.5, 0.75))', 'cosine']
    """
    pieces, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]


def row_of(one: Searched) -> MethodRow:
    """The tests of a method as a row of the table."""
    from polyfed.report.tables import MethodRow, method_row

    if one.problem or one.chosen is None:
        return MethodRow(one.method, problem=one.problem or "it was not searched")
    return method_row(one.chosen.trial.settings.method, one.outcomes)


def print_search(searching: Sweep) -> None:
    """Everything that was tried; the chosen ones are marked."""
    from rich.markup import escape

    from polyfed.report.tables import percent
    from polyfed.sweeps.trials import said

    names = [axis.name for axis in searching.axes]
    shown = table(("method", *names, "validation %", "chosen"), (*names, "validation %"))
    for one in searching.searched:
        for place, score in enumerate(one.scores):
            cells = [
                said({name: score.trial.values[name]}).partition("=")[2] if name in score.trial.values else "" for name in names
            ]
            chosen = score is one.chosen
            result = "failed" if score.validation is None else percent(score.validation)
            marked = f"[bold]{result}[/bold]" if chosen else result
            last = place + 1 == len(one.scores)
            shown.add_row(
                escape(one.method) if place == 0 else "", *map(escape, cells), marked, "<--" if chosen else "", end_section=last
            )
    trials = len(next(iter(searching.plans.values())))
    kind = "grid" if searching.random is None else "random search"
    print_table(f"{searching.settings.data}: {kind}, {trials} trials for each method", shown)
    out = console()
    out.print(
        "[dim]validation is the mean over clients of the accuracy on source-validation data; no test set was read for it.[/dim]"
    )
    for one, told in zip(searching.searched, searching.document()["methods"], strict=True):
        for name in told["at_the_edge"]:
            out.print(f"{escape(one.method)}: the chosen {name} is at the edge of what was tried; better values may lie beyond.")


def print_tests(searching: Sweep, rows: list[MethodRow]) -> None:
    """What the chosen settings reach on test data."""
    from rich.console import Console
    from rich.markup import escape

    from polyfed.cli.compare import WIDER_THAN_ANY, comparison_table
    from polyfed.sweeps.trials import said

    out = console()
    wide = Console(width=WIDER_THAN_ANY).measure(comparison_table(rows, stacked=False)).maximum > out.width
    out.print()
    print_table("tests of the chosen settings", comparison_table(rows, stacked=wide))
    for row in rows:
        if row.problem:
            out.print(f"[bold]{escape(row.method)}[/bold] could not be run: {escape(row.problem)}")
    for one in searching.searched:
        if one.chosen is not None:
            out.print(f"[dim]{escape(one.chosen.trial.settings.method)}: {escape(said(one.chosen.trial.values))}[/dim]")
    seeds = len(searching.seeds)
    meaning = f"the sample standard deviation over {seeds} seeds" if seeds > 1 else "the binomial standard error of one run"
    whole = "" if searching.hold_out is None else " What was held out in the search is trained on here."
    out.print(f"[dim]Accuracy in %; ± is {meaning}.{whole} Data: {escape(searching.whole.source)}.[/dim]")
    out.print(f"all trials and results: {searching.folder / 'sweep.json'}", soft_wrap=True, markup=False)
