"""What a sweep says while it works: a bar, or a line for each trial where there is no terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from polyfed.cli.output import show_progress, warn
from polyfed.sweeps.search import Watch

if TYPE_CHECKING:
    from polyfed.cli.runs_bar import RunsBar
    from polyfed.server import Server


class SweepWatch(Watch):
    """Moves the bar, says each notice once, and what is over where there is no bar."""

    def __init__(self, bar: RunsBar, quiet: bool) -> None:
        self.bar, self.quiet = bar, quiet
        self.told: set[str] = set()

    def begin(self, words: str, number: int, total: int) -> None:
        self.bar.begin(words, number, total)

    def round(self, server: Server) -> None:
        self.bar.round(server)

    def end(self, words: str, said: str) -> None:
        self.bar.end()
        if not self.quiet and not show_progress(self.quiet):
            print(f"{words}: {said}", file=sys.stderr)

    def notice(self, text: str) -> None:
        if text not in self.told and not self.quiet:
            warn(text)
        self.told.add(text)
