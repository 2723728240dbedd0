"""What commands print: tables on standard output, the rest on standard error, JSON as the last line."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_OF_FILES = 120


def console(stderr: bool = False) -> Console:
    """A console; one that writes to a file or pipe is wider than rich would make it."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_OF_FILES
    return Console(stderr=stderr, width=wide, highlight=False)


def table(columns: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """An empty table; ``numbers`` are columns aligned to the right."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        made.add_column(escape(column), justify="right" if column in numbers else "left", overflow="fold")
    return made


def print_table(title: str, made: Table) -> None:
    """Print a table under its title, which may be wider than the table."""
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{escape(title)}[/bold]")
    out.print(made)


def warn(text: str) -> None:
    """Say something on standard error."""
    print(f"polyfed: warning: {text}", file=sys.stderr)


def show_progress(quiet: bool) -> bool:
    """Whether a progress bar is welcome: there is somebody to see it."""
    return not quiet and sys.stderr.isatty()


@contextmanager
def busy(text: str, quiet: bool) -> Iterator[None]:
    """Show that something is being prepared."""
    if show_progress(quiet):
        with console(stderr=True).status(text):
            yield
    else:
        yield


def plain(tree: Any) -> Any:
    """The tree as JSON can hold it: what is not a finite number is null."""
    if isinstance(tree, Mapping):
        return {str(key): plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def print_json(tree: Any) -> None:
    """Print one JSON object as one line."""
    print(json.dumps(plain(tree), allow_nan=False, ensure_ascii=False), flush=True)


class _ToStandardError(logging.Handler):
    """Writes to whatever standard error is at the moment, since a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        print(f"polyfed: {level}{record.getMessage()}", file=sys.stderr)


def listen(quiet: bool) -> None:
    """Send what polyfed's logger says to standard error: warnings, and what was picked where a setting says auto."""
    log = logging.getLogger("polyfed")
    if not any(isinstance(handler, _ToStandardError) for handler in log.handlers):
        log.addHandler(_ToStandardError())
    log.setLevel(logging.ERROR if quiet else logging.INFO)
