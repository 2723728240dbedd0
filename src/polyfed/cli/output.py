"""What commands print: tables on standard output, the rest on standard error, JSON as the last line."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polyfed.reports.json_values import json_values

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

WIDTH_OF_FILES = 120


def visible(text: str) -> str:
    """The text with control characters, which a terminal would obey, written as escapes; also what cannot be encoded."""
    return "".join(char if char.isprintable() or char in "\n\t " else char.encode("unicode_escape").decode() for char in text)


def console(stderr: bool = False) -> Console:
    """A console; one that writes to a file or pipe is wider than rich would make it."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_OF_FILES

    class Careful(Console):
        """Obeys no control characters that came with names of data."""

        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **how)

    return Careful(stderr=stderr, width=wide, highlight=False)


def table(columns: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """An empty table; ``numbers`` are columns aligned to the right."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    class Careful(Table):
        """Shows control characters in cells as escapes."""

        def add_row(self, *cells: Any, **how: Any) -> None:
            super().add_row(*(visible(cell) if isinstance(cell, str) else cell for cell in cells), **how)

    made = Careful(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        made.add_column(visible(escape(column)), justify="right" if column in numbers else "left", overflow="fold")
    return made


def print_table(title: str, made: Table) -> None:
    """Print a table under its title, which may be wider than the table."""
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{escape(title)}[/bold]")
    out.print(made)


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
