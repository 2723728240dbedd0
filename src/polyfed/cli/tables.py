"""Tables that fit the terminal by hiding the least important columns; words are never broken."""

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
"""Minimum width of wrapped text, in characters; columns are hidden rather than narrowed further."""
EDGES, BETWEEN = 2, 2
"""Spaces at the edges of a table, and between two columns."""


def styled(text: str, style: str) -> Text:
    """Return a cell in ``bold`` or ``dim``. Plain strings are cells without style; they contain no markup."""
    from rich.text import Text

    return Text(visible(text), style)


@dataclass(frozen=True)
class _Column:
    """A column with its width without wrapping, the width of its longest word, and a readable width. Numbers are never wrapped."""

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
    """A table that selects its columns when it is printed.

    Args:
        columns: Names of all columns, in display order.
        rows: Cells of each row; None draws a separator line.
        numbers: Right-aligned columns that are never wrapped.
        optional: Groups of columns that are shown if they fit, the most important first. A group is shown completely or not at all.
    """

    def __init__(
        self, columns: Sequence[str], rows: Iterable[Row], numbers: Iterable[str] = (), optional: Iterable[Sequence[str]] = ()
    ) -> None:
        self.rows = [None if row is None else [styled(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
        filled = [row for row in self.rows if row is not None]
        for row in filled:
            if len(row) != len(columns):
                raise ValueError(f"A row has {len(row)} cells, but the table has {len(columns)} columns.")
        right = set(numbers)
        self.columns = [
            _Column.measured(name, [row[index].plain for row in filled], name in right) for index, name in enumerate(columns)
        ]
        # Columns are identified by index, because a domain may have the name of another column.
        self.optional = [[index for index, name in enumerate(columns) if name in group] for group in optional]

    def hidden(self, width: int) -> list[str]:
        """Return the names of the columns that do not fit."""
        shown = self._select(width, wide=False)
        return [column.name for index, column in enumerate(self.columns) if index not in shown]

    def printed_width(self, width: int, wide: bool = False) -> int:
        """Return the width of the output: more than the terminal if ``wide``, or if the most important columns do not fit."""
        columns = [self.columns[index] for index in self._select(width, wide)]
        return max(width, _total(column.natural if wide else column.word for column in columns))

    def build(self, width: int, wide: bool = False) -> Table:
        """Return the rich table with the columns that fit, or with all columns if ``wide``."""
        from rich import box
        from rich.table import Table

        selected = self._select(width, wide)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for index, column_width in zip(selected, self._widths(selected, width), strict=True):
            column = self.columns[index]
            justify: Any = "right" if column.is_number else "left"
            table.add_column(styled(column.name, ""), justify=justify, width=column_width, overflow="fold")
        for row in self.rows:
            if row is None:
                table.add_section()
            else:
                table.add_row(*(row[index] for index in selected))
        return table

    def _select(self, width: int, wide: bool) -> list[int]:
        selected = set(range(len(self.columns)))
        if wide:
            return sorted(selected)
        selected -= {index for group in self.optional for index in group}
        for group in self.optional:
            if _total(self.columns[index].readable for index in selected.union(group)) <= width:
                selected |= set(group)
        return sorted(selected)

    def _widths(self, selected: Sequence[int], width: int) -> list[int]:
        """Return the column widths: the natural ones if they fit, otherwise the minimum, with the remaining space distributed."""
        columns = [self.columns[index] for index in selected]
        natural = [column.natural for column in columns]
        if _total(natural) <= width:
            return natural
        widths = [column.readable for column in columns]
        if _total(widths) > width:
            widths = [column.word for column in columns]
        while _total(widths) < width:
            widths[max(range(len(widths)), key=lambda index: natural[index] - widths[index])] += 1
        return widths


def _total(widths: Iterable[int]) -> int:
    columns = list(widths)
    return EDGES + sum(columns) + BETWEEN * (len(columns) - 1)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Row],
    view: View = FITTED,
    numbers: Iterable[str] = (),
    optional: Iterable[Sequence[str]] = (),
) -> None:
    """Print a title and a table (see ``FittedTable``)."""
    print_fitted(title, FittedTable(columns, rows, numbers, optional), view)


def print_fitted(title: str, table: FittedTable, view: View = FITTED) -> None:
    """Print a title with the number of hidden columns, and the table."""
    out = console()
    hidden = 0 if view.wide else len(table.hidden(out.width))
    more = f"{hidden} more column{'s' * (hidden != 1)}: --wide" if hidden else ""
    heading = f"{title} ({more})" if title and more else title or more
    if heading:
        out.print(heading, style="bold", markup=False)
    width = table.printed_width(out.width, view.wide)
    console(width=width).print(table.build(width, view.wide))


def print_pairs(title: str, pairs: Mapping[str, Any], view: View = FITTED, columns: Sequence[str] = ("name", "value")) -> None:
    """Print a table of names and values."""
    print_table(title, columns, [(str(name), str(value)) for name, value in pairs.items()], view)


def emit(
    rows: Sequence[Mapping[str, Any]],
    columns: Columns,
    tree: Mapping[str, Any] | None,
    title: str = "",
    view: View = FITTED,
    numbers: Iterable[str] = (),
    optional: Iterable[Sequence[str]] = (),
) -> None:
    """Print rows as a table, or ``tree`` as JSON if it is not None.

    ``columns`` maps the name of each column to a key of the rows, or to a function that formats the cell. The other parameters are
    the same as for ``print_table``.
    """
    if tree is not None:
        print_json(tree)
        return
    cells = ([str(row[read]) if isinstance(read, str) else read(row) for read in columns.values()] for row in rows)
    print_table(title, list(columns), cells, view, numbers, optional)
