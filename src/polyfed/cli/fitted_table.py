"""A table that fits the terminal: it gives up whole columns, the least important first, and never breaks a word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyfed.cli.visible import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

READABLE = 24
"""Text is wrapped to no fewer characters than this before a column is given up."""
EDGES, BETWEEN = 2, 2
"""Blank characters at the two edges of a table, and between two columns."""


@dataclass
class Row:
    """The cells of a row, and how rich prints it."""

    cells: list[str]
    style: str | None = None
    ends_section: bool = False


@dataclass
class FittedTable:
    """A table whose columns are chosen when it is printed.

    Attributes:
        columns: the names of all columns, in the order they are shown in.
        numbers: columns aligned to the right; their cells are never wrapped.
        later: groups of columns that are shown where there is room, the most important first; a group is shown whole or not at all.
            The other columns are always shown.
    """

    columns: list[str]
    numbers: frozenset[str] = frozenset()
    later: tuple[tuple[str, ...], ...] = ()
    rows: list[Row] = field(default_factory=list)
    _measured: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)

    def add_row(self, *cells: str, style: str | None = None, end_section: bool = False) -> None:
        """Add a row; its cells may have rich's markup."""
        if len(cells) != len(self.columns):
            raise ValueError(f"A row of {len(cells)} cells in a table of {len(self.columns)} columns.")
        self._measured.clear()
        self.rows.append(Row([visible(cell) for cell in cells], style, end_section))

    def add_section(self) -> None:
        """Draw a line below the last row."""
        if self.rows:
            self.rows[-1].ends_section = True

    def left_out(self, width: int) -> list[str]:
        """The names of the columns that do not fit."""
        kept = self._kept(width)
        return [name for place, name in enumerate(self.columns) if place not in kept]

    def printed_width(self, width: int, wide: bool = False) -> int:
        """The terminal's width, or more where all columns are asked for or not even the most important ones fit."""
        chosen = self._places(width, wide)
        needed = self._natural if wide else self._longest_word
        return max(width, _total(map(needed, chosen)))

    def fitted(self, width: int, wide: bool = False) -> Table:
        """The table for rich, in the columns that fit; ``wide`` keeps all."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        places = self._places(width, wide)
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for place, columns in zip(places, self._widths(places, width), strict=True):
            side: Any = "right" if self._has_numbers(place) else "left"
            made.add_column(visible(escape(self.columns[place])), justify=side, width=columns, overflow="fold")
        for row in self.rows:
            made.add_row(*(row.cells[place] for place in places), style=row.style, end_section=row.ends_section)
        return made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print it in the width at hand."""
        yield self.fitted(options.max_width)

    def _places(self, width: int, wide: bool) -> list[int]:
        return list(range(len(self.columns))) if wide else self._kept(width)

    def _kept(self, width: int) -> list[int]:
        """The columns that fit. By place: a domain may be called like another column."""
        groups = [[place for place, name in enumerate(self.columns) if name in group] for group in self.later]
        chosen = set(range(len(self.columns))) - {place for group in groups for place in group}
        for group in groups:
            if _total(map(self._readable, chosen.union(group))) <= width:
                chosen |= set(group)
        return sorted(chosen)

    def _has_numbers(self, place: int) -> bool:
        return self.columns[place] in self.numbers

    def _texts(self, place: int) -> Iterable[Text]:
        from rich.markup import escape
        from rich.text import Text

        yield Text.from_markup(visible(escape(self.columns[place])))
        for row in self.rows:
            yield Text.from_markup(row.cells[place])

    def _natural(self, place: int) -> int:
        return self._widths_of(place)[0]

    def _longest_word(self, place: int) -> int:
        return self._widths_of(place)[1]

    def _widths_of(self, place: int) -> tuple[int, int]:
        """The width without wrapping, and the least that breaks no word; a line of numbers is one word, apart from the head."""
        if place not in self._measured:
            from rich.cells import cell_len

            head, *cells = (text.plain for text in self._texts(place))
            lines = [line for text in (head, *cells) for line in text.split("\n")]
            words = head.split()
            for text in cells:
                words += text.split("\n") if self._has_numbers(place) else text.split()
            self._measured[place] = max(map(cell_len, lines)), max(map(cell_len, words), default=1)
        return self._measured[place]

    def _readable(self, place: int) -> int:
        word = self._longest_word(place)
        return word if self._has_numbers(place) else max(word, min(self._natural(place), READABLE))

    def _widths(self, places: Sequence[int], width: int) -> list[int]:
        """A width for each column: all it wants if there is room, else what it needs and a share of what is left."""
        most = [self._natural(place) for place in places]
        if _total(most) <= width:
            return most
        found = [self._readable(place) for place in places]
        if _total(found) > width:
            found = [self._longest_word(place) for place in places]
        while _total(found) < width:
            hungriest = max(range(len(places)), key=lambda place: most[place] - found[place])
            found[hungriest] += 1
        return found


def _total(widths: Iterable[int]) -> int:
    """How wide a table of columns is."""
    columns = list(widths)
    return EDGES + sum(columns) + BETWEEN * (len(columns) - 1)
