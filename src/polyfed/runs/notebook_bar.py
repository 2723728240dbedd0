"""Progress in a notebook: one line of HTML that is replaced as the work goes on, so a cell's output never grows with the rounds."""

from __future__ import annotations

import html
import sys
import time
from typing import TYPE_CHECKING, Any

from polyfed.runs.watcher import Watcher

if TYPE_CHECKING:
    from polyfed.core.server import Server

PAUSE = 0.2
"""Seconds between two pictures of a bar; each is a message from the kernel to the page."""


def in_notebook() -> bool:
    """Whether this program is the kernel of a notebook: Jupyter, JupyterLab, VS Code, Colab."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None


def default_watcher() -> Watcher:
    """Who watches several runs where nobody was named: a bar in a notebook, nobody elsewhere."""
    return NotebookWatcher() if in_notebook() else Watcher()


class NotebookBar:
    """One output of a cell: how much is done, of how much, since when."""

    def __init__(self, words: str, unit: str, total: float, done: float = 0) -> None:
        from IPython.display import display

        self.words, self.unit, self.total, self.done, self.before = words, unit, total, done, done
        self.over = False
        self.began, self.drawn = time.monotonic(), time.monotonic()
        self.handle: Any = display(self._page(), raw=True, display_id=True)

    def move(self, done: float, words: str | None = None, total: float | None = None) -> None:
        """Show how far the work is; seldom enough not to keep the page busy."""
        self.words, self.total, self.done = words or self.words, total or self.total, done
        if done >= self.total or time.monotonic() - self.drawn >= PAUSE:
            self.draw()

    def stop(self) -> None:
        """Show where the work ended; nothing is left to wait for."""
        self.over = True
        self.draw()

    def draw(self) -> None:
        """Replace what the page shows."""
        self.drawn = time.monotonic()
        self.handle.update(self._page(), raw=True)

    def _page(self) -> dict[str, str]:
        seconds = time.monotonic() - self.began
        told = f"{int(self.done)} of {self.total:.0f} {self.unit}, {length_words(seconds)}"
        if self.before < self.done < self.total and not self.over:
            told += f", about {length_words(seconds * (self.total - self.done) / (self.done - self.before))} left"
        bar = f'<progress value="{self.done:g}" max="{self.total:g}" style="vertical-align:middle"></progress>'
        return {"text/html": f"<div>{html.escape(self.words)} {bar} {told}</div>", "text/plain": f"{self.words}: {told}"}


class NotebookWatcher(Watcher):
    """Moves a bar with every round of several runs, and prints each notice once."""

    def __init__(self) -> None:
        self.bar: NotebookBar | None = None
        self.number = 0
        self.noticed: set[str] = set()

    def begin(self, words: str, number: int, total: int) -> None:
        self.number = number
        if self.bar is None:
            self.bar = NotebookBar(words, "runs", total)
        self.bar.move(number - 1, words, total)

    def round(self, server: Server) -> None:
        if self.bar is not None:
            self.bar.move(self.number - 1 + server.round / server.rounds)

    def end(self, words: str, outcome: str) -> None:
        if self.bar is not None:
            self.bar.move(self.number, "Trained" if self.number >= self.bar.total else f"{words}: {outcome}")

    def notice(self, text: str) -> None:
        if text not in self.noticed:
            print(f"polyfed: {text}", file=sys.stderr)
        self.noticed.add(text)


def length_words(seconds: float) -> str:
    """A length of time, for people."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
