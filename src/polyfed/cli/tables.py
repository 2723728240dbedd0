"""Tables that fit the terminal: they give up whole columns, the least important first, and never break a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from polyfed.cli.output import FITTED, View, console, print_json, visible

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    Cell: TypeAlias = str | Text
    Row: TypeAlias = Sequence[Cell] | None
    Columns: TypeAlias = Mapping[str, str | Callable[[Mapping[str, Any]], str]]

READABLE = 24
"""Text is wrapped to no fewer characters than this before a column is given up."""
EDGES, BETWEEN = 2, 2
"""Blank characters at the two edges of a table, and between two columns."""


def styled(text: str, style: str) -> Text:
    """Return a cell in ``bold`` or ``dim``; other cells are plain text, in which nothing is markup."""
    from rich.text import Text

    return Text(visible(text), style)


@dataclass(frozen=True)
class _Column:
    """A column with its width if nothing is wrapped, the width of its longest word, and the width that reads well.

    A number is never wrapped: each of its lines is one word.
    """

    name: str
    is_number: bool
    natural: int
    word: int
    readable: int

    @classmethod
    def measured(cls, name: str, texts: Iterable[str], is_number: bool) -> _Column:
        from rich.cells import cell_len

        lines, words = visible(name).split("\n"), name.split()
        for text in texts:
            lines += text.split("\n")
            words += text.split("\n") if is_number else text.split()
        natural, word = max(map(cell_len, lines)), max(map(cell_len, words), default=1)
        return cls(name, is_number, natural, word, word if is_number else max(word, min(natural, READABLE)))


class FittedTable:
    """A table whose columns are chosen when it is printed.

    Args:
        columns: The names of all columns, in the order they are shown in.
        rows: The cells of each row; None draws a line below the row before.
        numbers: Columns aligned to the right, whose cells are never wrapped.
        later: Groups of columns that are shown if there is room, the most important first; a group is shown whole or not at all.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Row],
        numbers: Iterable[str] = (),
        later: Iterable[Sequence[str]] = (),
    ) -> None:
        self.rows = [None if row is None else [styled(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
        filled = [row for row in self.rows if row is not None]
        for row in filled:
            if len(row) != len(columns):
                raise ValueError(f"A row of {len(row)} cells in a table of {len(columns)} columns.")
        right = set(numbers)
        self.columns = [
            _Column.measured(name, [row[place].plain for row in filled], name in right) for place, name in enumerate(columns)
        ]
        # By place, since a domain may be called like another column.
        self.later = [[place for place, name in enumerate(columns) if name in group] for group in later]

    def left_out(self, width: int) -> list[str]:
        """Return the names of the columns that do not fit."""
        kept = self._places(width, wide=False)
        return [column.name for place, column in enumerate(self.columns) if place not in kept]

    def printed_width(self, width: int, wide: bool = False) -> int:
        """Return the terminal's width, or more if all columns are requested or not even the most important ones fit."""
        chosen = [self.columns[place] for place in self._places(width, wide)]
        return max(width, _total(column.natural if wide else column.word for column in chosen))

    def fitted(self, width: int, wide: bool = False) -> Table:
        """Return the table for rich, in the columns that fit; ``wide`` keeps all."""
        from rich import box
        from rich.table import Table

        places = self._places(width, wide)
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for place, wanted in zip(places, self._widths(places, width), strict=True):
            column = self.columns[place]
            made.add_column(styled(column.name, ""), justify="right" if column.is_number else "left", width=wanted, overflow="fold")
        for row in self.rows:
            if row is None:
                made.add_section()
            else:
                made.add_row(*(row[place] for place in places))
        return made

    def _places(self, width: int, wide: bool) -> list[int]:
        chosen = set(range(len(self.columns)))
        if wide:
            return sorted(chosen)
        chosen -= {place for group in self.later for place in group}
        for group in self.later:
            if _total(self.columns[place].readable for place in chosen.union(group)) <= width:
                chosen |= set(group)
        return sorted(chosen)

    def _widths(self, places: Sequence[int], width: int) -> list[int]:
        """Return a width for each column: all it wants if there is room, else what it needs and a share of what is left."""
        columns = [self.columns[place] for place in places]
        natural = [column.natural for column in columns]
        if _total(natural) <= width:
            return natural
        found = [column.readable for column in columns]
        if _total(found) > width:
            found = [column.word for column in columns]
        while _total(found) < width:
            found[max(range(len(found)), key=lambda place: natural[place] - found[place])] += 1
        return found


def _total(widths: Iterable[int]) -> int:
    columns = list(widths)
    return EDGES + sum(columns) + BETWEEN * (len(columns) - 1)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Row],
    view: View = FITTED,
    numbers: Iterable[str] = (),
    later: Iterable[Sequence[str]] = (),
) -> None:
    """Print a table (see ``FittedTable``) under its title."""
    print_fitted(title, FittedTable(columns, rows, numbers, later), view)


def print_fitted(title: str, made: FittedTable, view: View = FITTED) -> None:
    """Print a table under its title, which may be wider than the table and says how many columns did not fit."""
    out = console()
    width = made.printed_width(out.width, view.wide)
    left_out = 0 if view.wide else len(made.left_out(out.width))
    more = f"{left_out} more column{'s' * (left_out != 1)}: --wide" if left_out else ""
    heading = f"{title} ({more})" if title and more else title or more
    if heading:
        out.print(heading, style="bold", markup=False)
    console(width=width).print(made.fitted(width, view.wide))


def print_pairs(title: str, pairs: Mapping[str, Any], view: View = FITTED, heads: Sequence[str] = ("what", "found")) -> None:
    """Print names with their values."""
    print_table(title, heads, [(str(name), str(value)) for name, value in pairs.items()], view)


def emit(
    rows: Sequence[Mapping[str, Any]],
    columns: Columns,
    tree: Mapping[str, Any] | None,
    title: str = "",
    view: View = FITTED,
    numbers: Iterable[str] = (),
    later: Iterable[Sequence[str]] = (),
) -> None:
    """Print rows as JSON or as a table.

    Args:
        rows: What is listed.
        columns: The key of a row, or a function that writes the cell, by the column's name.
        tree: What JSON prints; None prints the table.
        title: Of the table, as are the others (see ``print_table``).
        view: See there.
        numbers: See there.
        later: See there.
    """
    if tree is not None:
        print_json(tree)
        return
    cells = ([str(row[read]) if isinstance(read, str) else read(row) for read in columns.values()] for row in rows)
    print_table(title, list(columns), cells, view, numbers, later)
