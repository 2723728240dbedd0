"""What commands print: results on standard output, the rest on standard error, JSON as the last line."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyfed.studies.report.words import json_values

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from polyfed.runs.callbacks.progress import ProgressBar

WIDTH_OF_FILES = 120


@dataclass(frozen=True)
class View:
    """How much of a table is printed.

    Attributes:
        wide: All columns, also if the terminal is narrower.
        explain: What the numbers mean in full, instead of one line.
    """

    wide: bool = False
    explain: bool = False


FITTED = View()


def visible(text: str) -> str:
    """Return the text with control characters, which a terminal would obey, written as escapes; also what cannot be encoded."""
    return "".join(char if char.isprintable() or char in "\n\t " else char.encode("unicode_escape").decode() for char in text)


def console(stderr: bool = False, width: int | None = None) -> Console:
    """Return a console; one that writes to a file or pipe is wider than rich would make it."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    default = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_OF_FILES

    class Careful(Console):
        """Obeys no control characters that came with names of data."""

        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **how)

    return Careful(stderr=stderr, width=width or default, highlight=False)


def say(text: str) -> None:
    """Print a sentence as it is: nothing in it is markup."""
    console().print(text, markup=False)


def print_line(text: str) -> None:
    """Print a line that may be copied, such as a command or a path: it is not wrapped."""
    console().print(text, soft_wrap=True, markup=False)


def print_at_once(line: str, error: bool = False) -> None:
    """Print a line for whoever follows the output in a file."""
    print(visible(line), file=sys.stderr if error else sys.stdout, flush=True)


def print_footnotes(short: str, sentences: Sequence[str], view: View, always: Sequence[str] = ()) -> None:
    """Print what the numbers mean: all sentences with ``--explain``, else one line, after those that are printed in any case."""
    out = console()
    for sentence in filter(None, sentences if view.explain else always):
        out.print(sentence, style="dim", markup=False)
    if not view.explain:
        line = f"{short} More: --explain.".strip()
        out.print(line if len(line) <= out.width else "More: --explain.", style="dim", markup=False)


def reason_in_short(reason: str, measure: str) -> str:
    """Return the first of several sentences about why another measure than accuracy heads a table: that its classes are uneven."""
    first, *more = reason.split(". ")
    return f"{first}." if more and measure != "accuracy" else ""


def print_warnings(sentences: Sequence[str]) -> None:
    """Print what must be read before any table; to standard output, so that it stays with the numbers."""
    from rich.markup import escape

    for sentence in sentences:
        console().print(f"[bold red]Warning:[/bold red] {escape(sentence)}")


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"polyfed: warning: {visible(text)}", file=sys.stderr)


def progress_bar(quiet: bool, message: bool = False) -> ProgressBar:
    """Return a bar over runs; without a terminal it prints a line for each run instead. ``message``: print messages also if quiet."""
    from polyfed.runs.callbacks.progress import ProgressBar

    return ProgressBar(not quiet and sys.stderr.isatty(), report=not quiet, message=warn if message or not quiet else None)


@contextmanager
def status(text: str, quiet: bool) -> Iterator[Status | None]:
    """Show what is being done, if there is a terminal; the text can be changed."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with console(stderr=True).status(text) as shown:
        yield shown


def print_json(tree: Any) -> None:
    """Print one JSON object as one line."""
    print(json.dumps(json_values(tree), allow_nan=False, ensure_ascii=False), flush=True)


class _ToStandardError(logging.Handler):
    """Writes to whatever standard error is at the moment, since a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        print(f"polyfed: {level}{visible(record.getMessage())}", file=sys.stderr)


def listen(quiet: bool) -> None:
    """Send what polyfed's logger says to standard error: warnings, and what was picked if a setting is auto."""
    log = logging.getLogger("polyfed")
    if not any(isinstance(handler, _ToStandardError) for handler in log.handlers):
        log.addHandler(_ToStandardError())
    log.setLevel(logging.ERROR if quiet else logging.INFO)
