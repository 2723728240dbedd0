"""The table of methods that ``polyfed compare`` and ``polyfed sweep`` print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyfed.cli.fitted_table import FittedTable
from polyfed.cli.output import View, console, print_table, table

if TYPE_CHECKING:
    from polyfed.studies.report.run_set import Column, MethodRow

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
    from polyfed.studies.report.run_set import RunSet

    flat = method_table(rows, stacked=False)
    if view.wide or not flat.left_out(width):
        return flat
    stacked = method_table(rows, stacked=True)
    names = {column.name for column in RunSet(rows).all_columns()}
    return flat if names & set(stacked.left_out(width)) else stacked


def method_table(rows: Sequence[MethodRow], stacked: bool) -> FittedTable:
    """A row for each method, the best of each column in bold; stacked, errors stand below their numbers."""
    from rich.markup import escape

    from polyfed.runs.headline import BASELINE
    from polyfed.studies.report.run_set import RunSet
    from polyfed.studies.report.words import percent

    runs = RunSet(rows)
    columns = runs.all_columns()
    best = {column: runs.best(column) for column in columns}
    costs = {"MB up": ("bytes_up", 1e6, 3), "MB down": ("bytes_down", 1e6, 3), "s": ("seconds", 1, 1)}
    cheapest = {name: runs.cheapest(what) for name, (what, _, _) in costs.items()}
    names = [column.name for column in columns]
    unseen = [name for name in names if name.startswith("unseen: ")]
    domains = [name for name in names if name not in (*MOST_IMPORTANT, *unseen)]
    shown = table(("method", *names, *costs), (*names, *costs), [unseen, domains, ["MB up"], ["s"], ["MB down"]])

    def cell(text: str, bold: bool) -> str:
        written = text.replace(" ±", "\n±") if stacked else text
        return f"[bold]{written}[/bold]" if bold else written

    def score(row: MethodRow, column: Column) -> str:
        number = row.number(column.view, column.key)
        return "-" if number is None else cell(percent(number.value, number.error), row in best[column])

    for row in rows:
        name = escape(row.method)
        if row.problem:
            shown.add_row(name, *("-" for _ in (*columns, *costs)))
            continue
        spent = [
            cell(f"{getattr(row, what) / unit:.{digits}f}", row in cheapest[cost]) for cost, (what, unit, digits) in costs.items()
        ]
        shown.add_row(name, *(score(row, column) for column in columns), *spent)
    by_chance = runs.baseline(columns)
    if by_chance:
        shown.add_section()
        chances = (percent(by_chance[column]) if column in by_chance else "-" for column in columns)
        shown.add_row(BASELINE, *chances, *("" for _ in costs), style="dim")
    return shown
