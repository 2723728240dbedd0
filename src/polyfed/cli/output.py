"""What commands print: tables on standard output, the rest on standard error, JSON as the last line."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyfed.cli.fitted_table import FittedTable
from polyfed.cli.visible import visible
from polyfed.studies.report.words import json_values

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from polyfed.runs.callbacks.progress import ProgressBar

WIDTH_OF_FILES = 120
EXPLAIN = "--explain"


@dataclass(frozen=True)
class View:
    """How much of a table is printed.

    Attributes:
        wide: all columns, also where the terminal is narrower.
        explain: what the numbers mean in full, in place of one line.
    """

    wide: bool = False
    explain: bool = False


FITTED = View()


def console(stderr: bool = False, width: int | None = None) -> Console:
    """A console; one that writes to a file or pipe is wider than rich would make it."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    own = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_OF_FILES

    class Careful(Console):
        """Obeys no control characters that came with names of data."""

        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **how)

    return Careful(stderr=stderr, width=width or own, highlight=False)


def table(columns: Sequence[str], numbers: Iterable[str] = (), later: Iterable[Sequence[str]] = ()) -> FittedTable:
    """An empty table; ``numbers`` are columns aligned to the right, ``later`` groups of columns to give up, the last first."""
    return FittedTable(list(columns), frozenset(numbers), tuple(map(tuple, later)))


def print_table(title: str, made: FittedTable, view: View = FITTED) -> None:
    """Print a table under its title, which may be wider than the table and says how many columns did not fit."""
    from rich.markup import escape

    out = console()
    width = made.printed_width(out.width, view.wide)
    left_out = 0 if view.wide else len(made.left_out(out.width))
    more = f"{left_out} more column{'s' * (left_out != 1)}: --wide" if left_out else ""
    heading = f"{title} ({more})" if title and more else title or more
    if heading:
        out.print(f"[bold]{escape(heading)}[/bold]")
    console(width=width).print(made.fitted(width, view.wide))


def print_footnotes(short: str, sentences: Sequence[str], view: View, always: Sequence[str] = ()) -> None:
    """What the numbers mean: all sentences with ``--explain``, else one line, after those that are said in any case."""
    from rich.markup import escape

    out = console()
    if view.explain:
        for sentence in filter(None, sentences):
            out.print(f"[dim]{escape(sentence)}[/dim]")
        return
    for sentence in filter(None, always):
        out.print(f"[dim]{escape(sentence)}[/dim]")
    line = f"{short} More: {EXPLAIN}.".strip()
    out.print(f"[dim]{escape(line if len(line) <= out.width else f'More: {EXPLAIN}.')}[/dim]")


def reason_in_short(reason: str, measure: str) -> str:
    """The first of several sentences about why another measure than accuracy heads a table: that its classes are uneven."""
    first, *more = reason.split(". ")
    return f"{first}." if more and measure != "accuracy" else ""


def print_warnings(sentences: Sequence[str]) -> None:
    """What must be read before any table: printed first, to standard output, so that it stays with the numbers."""
    out = console()
    for sentence in sentences:
        out.print(f"[bold red]Warning:[/bold red] {_plain(sentence)}")


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def warn(text: str) -> None:
    """Say something on standard error."""
    print(f"polyfed: warning: {visible(text)}", file=sys.stderr)


def show_progress(quiet: bool) -> bool:
    """Whether a progress bar is welcome: there is somebody to see it."""
    return not quiet and sys.stderr.isatty()


def progress_bar(quiet: bool, message: bool = False) -> ProgressBar:
    """Return a bar over runs; where there is no terminal, it prints a line for each run instead; ``message``: print messages also if quiet."""
    from polyfed.runs.callbacks.progress import ProgressBar

    return ProgressBar(show_progress(quiet), report=not quiet, message=warn if message or not quiet else None)


@contextmanager
def status(text: str, quiet: bool) -> Iterator[Status | None]:
    """Show what is being done, if somebody is there to see it; the text can be changed."""
    if not show_progress(quiet):
        yield None
        return
    with console(stderr=True).status(text) as shown:
        yield shown


@contextmanager
def busy(text: str, quiet: bool) -> Iterator[None]:
    """Show that something is being prepared."""
    with status(text, quiet):
        yield


def print_json(tree: Any) -> None:
    """Print one JSON object as one line."""
    print(json.dumps(json_values(tree), allow_nan=False, ensure_ascii=False), flush=True)


class _ToStandardError(logging.Handler):
    """Writes to whatever standard error is at the moment, since a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        print(f"polyfed: {level}{visible(record.getMessage())}", file=sys.stderr)


def listen(quiet: bool) -> None:
    """Send what polyfed's logger says to standard error: warnings, and what was picked where a setting says auto."""
    log = logging.getLogger("polyfed")
    if not any(isinstance(handler, _ToStandardError) for handler in log.handlers):
        log.addHandler(_ToStandardError())
    log.setLevel(logging.ERROR if quiet else logging.INFO)
