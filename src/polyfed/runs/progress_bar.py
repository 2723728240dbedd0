"""A progress bar over the rounds of one run, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyfed.core.loop import Observer

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


@contextlib.contextmanager
def progress_bar(experiment: Experiment, show: bool) -> Iterator[Observer | None]:
    """A bar with the time left, on standard error."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(str(experiment.method), total=experiment.settings.rounds, completed=experiment.server.round)
        yield lambda server: bar.update(task, completed=server.round)
