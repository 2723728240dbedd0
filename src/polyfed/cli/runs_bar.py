"""One bar over several runs with the time left, moved by every round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from polyfed.cli.output import console, show_progress

if TYPE_CHECKING:
    from rich.progress import Progress

    from polyfed.server import Server


class RunsBar:
    """Where the runs are. Nothing is shown without a bar to draw."""

    def __init__(self, bar: Progress | None = None) -> None:
        self.bar = bar
        self.task = None if bar is None else bar.add_task("", total=None)
        self.before = 0

    def begin(self, words: str, number: int, total: int) -> None:
        """A run begins, the first with number 1."""
        self.before = number - 1
        self._move(self.before, total, f"run {number} of {total}: {words}")

    def round(self, server: Server) -> None:
        """A round of it is over."""
        self._move(self.before + server.round / server.rounds)

    def end(self) -> None:
        """It is over."""
        self._move(self.before + 1)

    def _move(self, completed: float, total: int | None = None, words: str | None = None) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=completed, total=total, description=words)


@contextmanager
def runs_bar(quiet: bool) -> Iterator[RunsBar]:
    """A bar on standard error while the block runs, if somebody is there to see it."""
    if not show_progress(quiet):
        yield RunsBar()
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        yield RunsBar(bar)
