"""The table of methods that ``polyfed compare`` and ``polyfed sweep`` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyfed.cli.output import console, print_table, table

if TYPE_CHECKING:
    from rich.table import Table

    from polyfed.reports.tables import MethodRow

WIDER_THAN_ANY = 10_000


def print_methods(title: str, rows: Sequence[MethodRow]) -> None:
    """The table, stacked where it is wider than the console, and why methods could not be run."""
    from rich.console import Console
    from rich.markup import escape

    out = console()
    shown = method_table(rows, stacked=False)
    if Console(width=WIDER_THAN_ANY).measure(shown).maximum > out.width:
        shown = method_table(rows, stacked=True)
    print_table(title, shown)
    for row in rows:
        if row.problem:
            out.print(f"[bold]{escape(row.method)}[/bold] could not be run: {escape(row.problem)}")


def method_table(rows: Sequence[MethodRow], stacked: bool) -> Table:
    """A row for each method, the best of each column in bold; stacked, errors stand below their numbers."""
    from rich.markup import escape

    from polyfed.reports.tables import baseline_of, best_methods, column_names, percent
    from polyfed.runs.headline import BASELINE

    best, columns = best_methods(rows), column_names(rows)
    costs = ("MB\nup", "MB\ndown", "s") if stacked else ("MB up", "MB down", "s")
    shown = table(("method", *columns, *costs), (*columns, *costs))

    def broken(text: str, before: str) -> str:
        return text.replace(f" {before}", f"\n{before}") if stacked else text

    def cell(row: MethodRow, column: str, text: str) -> str:
        return f"[bold]{broken(text, '±')}[/bold]" if row.method in best.get(column, ()) else broken(text, "±")

    for row in rows:
        name = broken(broken(escape(row.method), "+"), "with")
        if row.problem:
            shown.add_row(name, *("-" for _ in (*columns, *costs)))
            continue
        numbers = row.columns()
        cells = [cell(row, key, percent(numbers[key].value, numbers[key].error)) if key in numbers else "-" for key in columns]
        traffic = [cell(row, "up", f"{row.bytes_up / 1e6:.3f}"), cell(row, "down", f"{row.bytes_down / 1e6:.3f}")]
        shown.add_row(name, *cells, *traffic, cell(row, "seconds", f"{row.seconds:.1f}"))
    by_chance = baseline_of(rows, next((row.measure for row in rows if not row.problem), "accuracy"))
    if by_chance:
        shown.add_section()
        shown.add_row(
            BASELINE, *(percent(by_chance[c]) if c in by_chance else "-" for c in columns), *("" for _ in costs), style="dim"
        )
    return shown
