"""What is seen of several runs while they are trained: one bar with the time left, or a line for each where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polyfed.cli.output import console, show_progress, warn
from polyfed.runs.watcher import Watcher

if TYPE_CHECKING:
    from rich.progress import Progress

    from polyfed.core.server import Server


class RunsBar(Watcher):
    """Moves the bar with every round, prints each notice once, and how runs ended where there is no bar."""

    def __init__(self, bar: Progress | None = None, quiet: bool = False) -> None:
        self.bar, self.quiet = bar, quiet
        self.task = None if bar is None else bar.add_task("Preparing data", total=None)
        self.before = 0
        self.noticed: set[str] = set()

    def begin(self, words: str, number: int, total: int) -> None:
        self.before = number - 1
        self._move(self.before, total, f"run {number} of {total}: {words}")

    def round(self, server: Server) -> None:
        self._move(self.before + server.round / server.rounds)

    def end(self, words: str, outcome: str) -> None:
        self._move(self.before + 1)
        if self.bar is None and not self.quiet:
            print(f"{words}: {outcome}", file=sys.stderr)

    def notice(self, text: str) -> None:
        if text not in self.noticed and not self.quiet:
            warn(text)
        self.noticed.add(text)

    def _move(self, completed: float, total: int | None = None, words: str | None = None) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=completed, total=total, description=words)


@contextmanager
def runs_bar(quiet: bool) -> Iterator[RunsBar]:
    """A bar on standard error while the block runs, if somebody is there to see it."""
    if not show_progress(quiet):
        yield RunsBar(quiet=quiet)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        yield RunsBar(bar, quiet)
