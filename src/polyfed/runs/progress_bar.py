"""A progress bar over the rounds of one run: on standard error, or in a notebook."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyfed.core.loop import Observer
from polyfed.runs.notebook_bar import NotebookBar, in_notebook

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


@contextlib.contextmanager
def progress_bar(experiment: Experiment, show: bool | None) -> Iterator[Observer | None]:
    """A bar with the time left.

    Args:
        experiment: what is trained.
        show: whether there is one; None: where this is a notebook.
    """
    notebook = in_notebook()
    if not (notebook if show is None else show):
        yield None
        return
    if notebook:
        shown = NotebookBar(str(experiment.method), "rounds", experiment.settings.rounds, experiment.server.round)
        try:
            yield lambda server: shown.move(server.round)
        finally:
            shown.stop()
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
