"""Published numbers: one cell of a paper's table, as it was printed, recomputed, or not available."""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyfed.errors import SettingError

NUMBER = r"[+-]?\d+(?:\.\d+)?"
TOKEN = re.compile(rf"(?P<about>≈)?(?P<value>{NUMBER})(?:±(?P<spread>{NUMBER}|\?))?")
NOT_AVAILABLE, NO_CELL = "n/a", "-"


@dataclass(frozen=True)
class Published:
    """One published cell.

    Attributes:
        text: as the experiment file has it.
        value: the number; None where it is only drawn, unreadable, or where the paper has no such cell.
        spread: its standard deviation, where it was printed.
        recomputed: whether the number was lost in the text of the paper and follows from others.
    """

    text: str
    value: float | None = None
    spread: float | None = None
    recomputed: bool = False

    @property
    def exists(self) -> bool:
        """Whether the paper has a cell here at all."""
        return self.text != NO_CELL

    def __str__(self) -> str:
        return self.text.replace("±", " ± ").replace(" ± ?", "")


def read_cell(text: str) -> Published:
    """Read one cell.

    >>> read_cell("96.2±0.2").value, read_cell("67.0±?").spread, read_cell("≈61.2").recomputed, read_cell("n/a").value
    (96.2, None, True, None)
    """
    if text in (NOT_AVAILABLE, NO_CELL):
        return Published(text)
    found = TOKEN.fullmatch(text)
    if found is None:
        raise SettingError(
            f"Cannot read the published cell {text!r}. Write 96.2, 96.2±0.2, ≈96.2, n/a (not available) or - (none)."
        )
    spread = None if found["spread"] in (None, "?") else float(found["spread"])
    return Published(text, float(found["value"]), spread, found["about"] is not None)


def read_cells(text: str, columns: int, where: str) -> tuple[Published, ...]:
    """Read the cells of a row, apart by blanks; nothing written: none is available."""
    words = text.split() or [NOT_AVAILABLE] * columns
    if len(words) != columns:
        raise SettingError(f"{where}: {len(words)} published cells for {columns} columns.")
    return tuple(map(read_cell, words))
