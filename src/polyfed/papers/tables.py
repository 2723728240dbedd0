"""The paper's tables with our numbers beside its own: plain rows with footnotes, which the command line and the page put into their own shape."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from polyfed.papers.files import UNITS, Part
from polyfed.papers.grid import NOT_ASKED
from polyfed.papers.reproduction import Outcome, Reproduction


class Footnotes:
    """Gives every sentence a mark, the same each time."""

    def __init__(self) -> None:
        self.marks: dict[str, str] = {}

    def mark(self, sentences: Sequence[str]) -> str:
        """The marks of sentences: a, b, ..., z, aa, ab, ..."""
        return ",".join(self.marks.setdefault(sentence, letters(len(self.marks))) for sentence in sentences)

    def lines(self) -> list[str]:
        """Every sentence after its mark."""
        return [f"{mark}) {sentence}." for sentence, mark in self.marks.items()]


def letters(number: int) -> str:
    """The number as letters.

    >>> letters(0), letters(25), letters(26)
    ('a', 'z', 'aa')
    """
    first, last = divmod(number, 26)
    return ("" if first == 0 else letters(first - 1)) + string.ascii_lowercase[last]


@dataclass
class ShownTable:
    """One part as text: a head, and lines of cells."""

    name: str
    head: list[str]
    lines: list[list[str]] = field(default_factory=list)


def shown_tables(found: Reproduction, footnotes: Footnotes) -> list[ShownTable]:
    """A table for each part of which something is asked for: published, ours and the difference in each cell."""
    tables = []
    for part, outcomes in parts_of(found):
        if any(one.state != NOT_ASKED and one.cell.published.exists for one in outcomes):
            tables.append(shown_table(part, outcomes, footnotes))
    return tables


def parts_of(found: Reproduction) -> Iterator[tuple[Part, Sequence[Outcome]]]:
    """Every part with its cells, row by row."""
    before = 0
    for part in found.item.parts:
        count = len(part.rows) * len(part.columns)
        yield part, found.outcomes[before : before + count]
        before += count


def shown_table(part: Part, outcomes: Sequence[Outcome], footnotes: Footnotes) -> ShownTable:
    """One part as text."""
    table = ShownTable(part.name, ["method", *(column.name for column in part.columns)])
    width = len(part.columns)
    for number, row in enumerate(part.rows):
        cells = outcomes[number * width : (number + 1) * width]
        table.lines.append([row.name, *(cell_words(one, footnotes) for one in cells)])
    return table


def cell_words(one: Outcome, footnotes: Footnotes) -> str:
    """A cell: published, ours, difference, and the marks of what differs."""
    if not one.cell.published.exists:
        return "–"
    marks = footnotes.mark(one.notes)
    difference = one.difference
    digits = UNITS[one.cell.part.unit][1]
    words = f"{one.cell.published} / {one.words()}" + ("" if difference is None else f" ({difference:+.{digits}f})")
    return f"{words} {marks}" if marks else words


LEGEND = "Each cell: published / ours (ours minus published), then the marks of what differs from the paper. n/a: not available as a number."
