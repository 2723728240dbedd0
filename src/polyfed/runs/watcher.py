"""Who watches several runs while they are trained: a progress bar, a log, or nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyfed.core.server import Server


class Watcher:
    """Hears of every run of a comparison or a search. This one is silent; override what you want to hear of."""

    def begin(self, words: str, number: int, total: int) -> None:
        """A run begins.

        Args:
            words: what it is, for people.
            number: its place among all runs, from 1.
            total: the number of all runs.
        """

    def round(self, server: Server) -> None:
        """A round of the run is over."""

    def end(self, words: str, outcome: str) -> None:
        """The run is over.

        Args:
            words: as ``begin`` had them.
            outcome: what came out, in a few words.
        """

    def notice(self, text: str) -> None:
        """Something a user should know; the same text may come several times."""
