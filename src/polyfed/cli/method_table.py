"""The table of methods that ``polyfed compare`` and ``polyfed sweep`` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyfed.cli.fitted_table import FittedTable
from polyfed.cli.output import View, console, print_table, table

if TYPE_CHECKING:
    from polyfed.studies.report.tables import MethodRow

MOST_IMPORTANT = ("mean", "worst")
"""The columns that are shown on the narrowest terminal."""


def print_methods(title: str, rows: Sequence[MethodRow], view: View) -> None:
    """The table, and why methods could not be run, each reason once."""
    from rich.markup import escape

    out = console()
    print_table(title, fitting(rows, out.width, view), view)
    for problem in dict.fromkeys(row.problem for row in rows if row.problem):
        methods = "; ".join(f"[bold]{escape(row.method)}[/bold]" for row in rows if row.problem == problem)
        out.print(f"{methods} could not be run: {escape(problem)}")


def fitting(rows: Sequence[MethodRow], width: int, view: View) -> FittedTable:
    """The table on one line for each method if all columns fit, else stacked if that saves the columns of domains."""
    from polyfed.studies.report.tables import column_names

    flat = method_table(rows, stacked=False)
    if view.wide or not flat.left_out(width):
        return flat
    stacked = method_table(rows, stacked=True)
    return flat if set(column_names(rows)) & set(stacked.left_out(width)) else stacked


def method_table(rows: Sequence[MethodRow], stacked: bool) -> FittedTable:
    """A row for each method, the best of each column in bold; stacked, errors stand below their numbers."""
    from rich.markup import escape

    from polyfed.runs.headline import BASELINE
    from polyfed.studies.report.tables import baseline_of, best_methods, column_names, percent

    best, columns = best_methods(rows), column_names(rows)
    costs = ("MB up", "MB down", "s")
    unseen = [name for name in columns if name.startswith("unseen: ")]
    domains = [name for name in columns if name not in (*MOST_IMPORTANT, *unseen)]
    shown = table(("method", *columns, *costs), (*columns, *costs), [unseen, domains, ["MB up"], ["s"], ["MB down"]])

    def cell(row: MethodRow, column: str, text: str) -> str:
        written = text.replace(" ±", "\n±") if stacked else text
        return f"[bold]{written}[/bold]" if row.method in best.get(column, ()) else written

    for row in rows:
        name = escape(row.method)
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
