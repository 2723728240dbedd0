"""``polyfed compare``: several methods over several seeds, in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.comparing import Comparison, Job
from polyfed.cli.estimating import print_estimate
from polyfed.cli.guard import BAD_INPUT, stoppable
from polyfed.cli.options import Changes, EstimateOnly, Json, Quiet, Recipe, chosen_settings, with_settings
from polyfed.cli.output import busy, console, listen, print_json, print_table, table
from polyfed.cli.run import data_slug, rounds_words
from polyfed.errors import SettingError, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from polyfed.report.costs import Expense, Spent
    from polyfed.report.tables import MethodRow, Number
    from polyfed.settings import Settings

EXAMPLE = (
    'Examples:\n\npolyfed compare digits-mini --methods "fedavg; fedbn; fedavg + group_norm" --seeds 3\n\n'
    'polyfed compare digits-mini --methods "fedavg; fedbn" --protocol leave-one-out'
)
SEEN, LEAVE_ONE_OUT = PROTOCOLS = ("seen", "leave-one-out")
WIDER_THAN_ANY = 10_000


@with_settings("data", "method")
def compare(
    values: dict[str, Any],
    methods: Annotated[str, typer.Option("--methods", metavar="TEXTS", help="Methods, apart by semicolons.")],
    data: Annotated[str | None, typer.Argument(metavar="DATA", help="A data set, or a folder root/<domain>/<class>/*.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Seeds for each method: --seed, --seed + 1, ...")] = 1,
    protocol: Annotated[str, typer.Option("--protocol", help="seen, or leave-one-out: every domain unseen in turn.")] = SEEN,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="DIR", help="Folder of the run folders; default: runs/compare-<data>.")
    ] = None,
    recipe: Recipe = None,
    changes: Changes = None,
    costs: Annotated[
        bool | None,
        typer.Option(
            "--costs/--no-costs",
            help="Print what leaves clients, and extra bytes, CPU seconds and memory beside fedavg; default: where fedavg is compared.",
            show_default=False,
        ),
    ] = None,
    estimate: EstimateOnly = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train several methods and compare them in one table; runs that are there already are reused."""
    from polyfed.report.costs import NOTE, REFERENCE
    from polyfed.report.tables import cost_table, reference_of

    listen(quiet)
    # Nobody trains on the domain left out, so all its images can be tested, as the papers do.
    defaults = {"unseen_part": "all"} if protocol == LEAVE_ONE_OUT else {}
    settings = chosen_settings(data, values, changes, recipe, defaults)
    if seeds < 1:
        raise SettingError(f"--seeds must be at least 1, found {seeds}.")
    if protocol not in PROTOCOLS:
        raise SettingError(f"--protocol cannot be {protocol!r}. {nearest(protocol, PROTOCOLS)}")
    if protocol == LEAVE_ONE_OUT and settings.unseen:
        raise SettingError("--protocol leave-one-out chooses the unseen domains itself; leave --unseen out.")
    texts = method_texts(methods, settings)
    if costs and REFERENCE not in texts:
        raise SettingError(
            f'--costs sets methods beside {REFERENCE}, which is not among --methods. Add it: "{REFERENCE}; {texts[0]}".'
        )
    folder = Path(out) if out is not None else Path("runs") / f"compare-{data_slug(settings.data)}"
    with busy("Preparing data", quiet):
        comparison = Comparison(settings, folder, quiet)
    jobs = jobs_of(texts, settings, seeds, comparison.domains if protocol == LEAVE_ONE_OUT else [None])
    if estimate:
        print_estimate(jobs, as_json, quiet, comparison.data)
        return
    with stoppable("the same command goes on from here; finished runs are kept."):
        rows = comparison.rows(jobs)
    note = footnote(comparison, rows, settings, seeds, protocol)
    besides = cost_table(rows)
    if not quiet:
        _print(rows, note, f"{settings.data}, {protocol}" if protocol != SEEN else settings.data)
        reference = reference_of(rows) if costs is not False else None
        if reference is not None:
            print_costs(besides, reference)
        console().print(f"run folders: {folder}", soft_wrap=True, markup=False)
    if as_json:
        told = {"data": settings.data, "protocol": protocol, "seeds": [settings.seed + step for step in range(seeds)]}
        by_method = {one.method: one for one in besides}
        shown = [row_told(row, by_method.get(row.method)) for row in rows]
        notes = {"note": note, "costs_note": NOTE}
        print_json({**told, "rounds": comparison.rounds or settings.rounds, "methods": shown, **notes, "out": str(folder)})
    if any(row.problem for row in rows):
        raise typer.Exit(BAD_INPUT)


def method_texts(methods: str, settings: Settings) -> list[str]:
    """The canonical texts, each once; what cannot be read stops before anything is trained."""
    from polyfed.cli.ls import load_files
    from polyfed.method import parse

    load_files(list(settings.load))
    found = [str(parse(text)) for text in methods.split(";") if text.strip()]
    if not found:
        raise SettingError('--methods names no method. Write them apart by semicolons: "fedavg; fedbn".')
    return list(dict.fromkeys(found))


def jobs_of(texts: list[str], settings: Settings, seeds: int, left_out: Sequence[str | None]) -> list[Job]:
    """Every run of the comparison."""
    return [
        Job(
            text,
            seed,
            domain,
            dataclasses.replace(settings, method=text, seed=seed, unseen=settings.unseen if domain is None else (domain,)),
        )
        for text in texts
        for seed in range(settings.seed, settings.seed + seeds)
        for domain in left_out
    ]


def footnote(comparison: Comparison, rows: list[MethodRow], settings: Settings, seeds: int, protocol: str) -> str:
    """What the table means, in sentences."""
    if seeds > 1:
        meaning = f"± is the sample standard deviation over {seeds} seeds ({settings.seed} to {settings.seed + seeds - 1})"
    else:
        meaning = f"± is the binomial standard error of the test of one run (seed {settings.seed})"
    work = (
        f"{settings.local_steps} local steps"
        if settings.local_steps is not None
        else f"{settings.local_epochs} local epoch{'s' * (settings.local_epochs > 1)}"
    )
    length = f"{rounds_words(comparison.rounds or settings.rounds)} of {work}, batch {settings.batch_size}, lr {settings.lr:g}, {settings.optimizer}"
    sizes = ", ".join(f"{domain} {count}" for domain, count in comparison.test_sizes.items())
    tested = "all images of" if settings.unseen_part == "all" else "the test part of"
    left_out = (
        f" Each column is the accuracy of the newcomer on {tested} a domain that nobody trained on."
        if protocol == LEAVE_ONE_OUT
        else ""
    )
    return (
        f"Accuracy in %; {meaning}. {length}.{left_out} MB are training traffic per client and round; s are the seconds of training per seed. "
        f"Data: {comparison.source or settings.data}. Test images: {sizes or 'none scored'}."
    )


def row_told(row: MethodRow, cost: Expense | None = None) -> dict[str, Any]:
    """A row as JSON; ``cost`` sets it beside the reference."""
    from polyfed.report.costs import told as cost_told

    def told(number: Number | None) -> dict[str, Any] | None:
        return None if number is None else {"mean": number.value, "error": number.error, "values": number.values}

    return {
        "method": row.method,
        "accuracy": {
            "seen": {domain: told(number) for domain, number in row.seen.items()},
            "unseen": {domain: told(number) for domain, number in row.unseen.items()},
            "mean": told(row.mean),
            "worst": told(row.worst),
        },
        "bytes_up_per_client_and_round": row.bytes_up,
        "bytes_down_per_client_and_round": row.bytes_down,
        "seconds": row.seconds,
        "costs": None if cost is None else cost_told(cost),
        "runs": row.runs,
        "problem": row.problem or None,
    }


def _print(rows: list[MethodRow], note: str, title: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    out = console()
    shown = comparison_table(rows, stacked=False)
    if Console(width=WIDER_THAN_ANY).measure(shown).maximum > out.width:
        shown = comparison_table(rows, stacked=True)
    print_table(title, shown)
    for row in rows:
        if row.problem:
            out.print(f"[bold]{escape(row.method)}[/bold] could not be run: {escape(row.problem)}")
    out.print(f"[dim]{escape(note)}[/dim]")


def print_costs(rows: list[Expense], reference: Spent) -> None:
    """The second table: cost and privacy beside the reference."""
    from rich.markup import escape

    from polyfed.report.costs import HEADS, NOTE, REFERENCE, cells, reference_words

    shown = table(("method", *HEADS), [head for head in HEADS if head != "grain"])
    for row in rows:
        shown.add_row(escape(row.method), *cells(row))
    print_table(f"cost and privacy beside {REFERENCE}", shown)
    out = console()
    for row in rows:
        if row.leaves:
            out.print(f"[bold]{escape(row.method)}[/bold] sends: {escape(row.leaves)} ({row.grain or 'grain not declared'}).")
    out.print(f"[dim]{escape(reference_words(reference))} {escape(NOTE)}[/dim]")


def comparison_table(rows: list[MethodRow], stacked: bool) -> Table:
    """A row for each method, the best of each column in bold; stacked, errors stand below their numbers."""
    from rich.markup import escape

    from polyfed.report.tables import best_methods, column_names, percent

    best, columns = best_methods(rows), column_names(rows)
    costs = ("MB\nup", "MB\ndown", "s") if stacked else ("MB up", "MB down", "s")
    shown = table(("method", *columns, *costs), (*columns, *costs))

    def broken(text: str, before: str) -> str:
        return text.replace(f" {before}", f"\n{before}") if stacked else text

    def cell(row: MethodRow, column: str, text: str) -> str:
        return f"[bold]{broken(text, '±')}[/bold]" if row.method in best.get(column, ()) else broken(text, "±")

    for row in rows:
        name = broken(escape(row.method), "+")
        if row.problem:
            shown.add_row(name, *("-" for _ in (*columns, *costs)))
            continue
        numbers = row.columns()
        cells = [cell(row, key, percent(numbers[key].value, numbers[key].error)) if key in numbers else "-" for key in columns]
        traffic = [cell(row, "up", f"{row.bytes_up / 1e6:.3f}"), cell(row, "down", f"{row.bytes_down / 1e6:.3f}")]
        shown.add_row(name, *cells, *traffic, cell(row, "seconds", f"{row.seconds:.1f}"))
    return shown
