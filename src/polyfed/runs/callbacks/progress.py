"""A progress bar over the rounds of a run, or over several runs, in a terminal or notebook."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.runs.callbacks.callback import Callback, RunState

if TYPE_CHECKING:
    from polyfed.runs.result import Result

PAUSE = 0.2
"""Seconds between two updates of a notebook bar; each sends a message from the kernel to the page."""


def in_notebook() -> bool:
    """Return True if this process is a notebook kernel (Jupyter, JupyterLab, VS Code, Colab)."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None


def print_message(text: str) -> None:
    print(f"polyfed: {text}", file=sys.stderr)


class ProgressBar(Callback):
    """Show the progress of training, and print each message once. As a context manager, it removes the bar from a terminal at its end.

    Args:
        show: Show a bar; by default only in a notebook.
        report: Without a bar, print a line when one of several runs ends.
        message: Function that prints a message; None suppresses messages.
    """

    def __init__(
        self, show: bool | None = None, report: bool = False, message: Callable[[str], None] | None = print_message
    ) -> None:
        self.show = in_notebook() if show is None else show
        self.report, self.print_message = report, message
        self.printed: set[str] = set()
        self.bar: TerminalBar | NotebookBar | None = None

    def __enter__(self) -> ProgressBar:
        if self.show and not in_notebook():
            self.bar = TerminalBar()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, run: RunState) -> None:
        self.run, self.first_round = run, run.round
        if self.show and self.bar is None:
            self.bar = NotebookBar() if in_notebook() else TerminalBar()
        self._move(run)

    def after_round(self, run: RunState) -> None:
        self._move(run)

    def end(self, result: Result) -> None:
        run, number = self.run, result.experiment.server.round
        how = "trained" if not run.resumed else "resumed" if number > self.first_round else "reused"
        stopped = "" if number == run.rounds else f", stopped after round {number}"
        if self.bar is not None and run.label:
            text = "Trained" if run.number == run.total else f"{run.label}: {result.words}, {how}"
            self.bar.move(run.number, run.total, "runs", text)
        elif self.report and run.label:
            print(f"{run.label}: {result.words}{stopped}, {how}", file=sys.stderr)

    def message(self, text: str) -> None:
        if self.print_message is not None and text not in self.printed:
            self.print_message(text)
        self.printed.add(text)

    def _move(self, run: RunState) -> None:
        if self.bar is None:
            return
        if run.label:
            done = run.number - 1 + run.round / run.rounds
            self.bar.move(done, run.total, "runs", f"run {run.number} of {run.total}: {run.label}")
        else:
            self.bar.move(run.round, run.rounds, "rounds", run.method)


def default_callbacks(callbacks: Sequence[Callback] | None) -> Sequence[Callback]:
    """Return the callbacks of a comparison or search; by default a progress bar in a notebook, and nothing elsewhere."""
    return callbacks if callbacks is not None else [ProgressBar()] if in_notebook() else []


class TerminalBar:
    """A rich progress bar on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        text, count = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[count]}", markup=False)
        columns = (text, BarColumn(), count, TimeElapsedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.progress.add_task("Preparing data", total=None, count="")
        self.progress.start()

    def move(self, done: float, total: int, unit: str, text: str) -> None:
        self.progress.update(self.task, completed=done, total=total, description=text, count=f"{int(done)}/{total} {unit}")

    def stop(self) -> None:
        self.progress.stop()


class NotebookBar:
    """A line of HTML that is replaced, so that the output of the cell does not grow with the rounds."""

    def __init__(self) -> None:
        self.stopped = False
        self.started = self.drawn = time.monotonic()
        self.handle: Any = None

    def move(self, done: float, total: int, unit: str, text: str) -> None:
        self.done, self.total, self.unit, self.text = done, total, unit, text
        if self.handle is None:
            from IPython.display import display

            self.done_before = done
            self.handle = display(self._page(), raw=True, display_id=True)
        elif done >= total or time.monotonic() - self.drawn >= PAUSE:
            self.drawn = time.monotonic()
            self.handle.update(self._page(), raw=True)

    def stop(self) -> None:
        self.stopped = True
        if self.handle is not None:
            self.handle.update(self._page(), raw=True)

    def _page(self) -> dict[str, str]:
        seconds = time.monotonic() - self.started
        count = f"{int(self.done)} of {self.total:.0f} {self.unit}, {format_duration(seconds)}"
        if self.done_before < self.done < self.total and not self.stopped:
            count += f", about {format_duration(seconds * (self.total - self.done) / (self.done - self.done_before))} left"
        bar = f'<progress value="{self.done:g}" max="{self.total:g}" style="vertical-align:middle"></progress>'
        return {"text/html": f"<div>{html.escape(self.text)} {bar} {count}</div>", "text/plain": f"{self.text}: {count}"}


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
