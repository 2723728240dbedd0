"""Output of commands: results on standard output, everything else on standard error, JSON on the last line."""

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
    """Display options of tables.

    Attributes:
        wide: Show all columns, even if the terminal is narrower.
        explain: Show all footnotes instead of one line.
    """

    wide: bool = False
    explain: bool = False


FITTED = View()


def visible(text: str) -> str:
    """Escape control characters and characters that cannot be encoded."""
    return "".join(char if char.isprintable() or char in "\n\t " else char.encode("unicode_escape").decode() for char in text)


def console(stderr: bool = False, width: int | None = None) -> Console:
    """Return a console. Its default width is 120 if the output is not a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    default = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_OF_FILES

    class EscapingConsole(Console):
        """Console that escapes control characters, which may come from the names of data."""

        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **how)

    return EscapingConsole(stderr=stderr, width=width or default, highlight=False)


def print_text(text: str) -> None:
    """Print text that contains no markup."""
    console().print(text, markup=False)


def print_line(text: str) -> None:
    """Print a line without wrapping it, such as a command or a path that the user may copy."""
    console().print(text, soft_wrap=True, markup=False)


def print_now(line: str, error: bool = False) -> None:
    """Print a line and flush the output."""
    print(visible(line), file=sys.stderr if error else sys.stdout, flush=True)


def print_footnotes(short: str, sentences: Sequence[str], view: View, always: Sequence[str] = ()) -> None:
    """Print footnotes: all ``sentences`` with ``--explain``, otherwise ``always`` and one short line."""
    out = console()
    for sentence in filter(None, sentences if view.explain else always):
        out.print(sentence, style="dim", markup=False)
    if not view.explain:
        out.print(f"{short} More: --explain.".strip(), style="dim", markup=False)


def short_reason(reason: str, metric: str) -> str:
    """Return the first sentence of a longer explanation why accuracy is not the primary metric."""
    first, *more = reason.split(". ")
    return f"{first}." if more and metric != "accuracy" else ""


def print_warnings(sentences: Sequence[str]) -> None:
    """Print warnings about results on standard output, next to the numbers."""
    from rich.markup import escape

    for sentence in sentences:
        console().print(f"[bold red]Warning:[/bold red] {escape(sentence)}")


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"polyfed: warning: {visible(text)}", file=sys.stderr)


def progress_bar(quiet: bool, message: bool = False) -> ProgressBar:
    """Return a progress bar over runs, or a reporter that prints one line per run without a terminal.

    ``message`` prints messages even if ``quiet``.
    """
    from polyfed.runs.callbacks.progress import ProgressBar

    return ProgressBar(not quiet and sys.stderr.isatty(), report=not quiet, message=warn if message or not quiet else None)


@contextmanager
def status(text: str, quiet: bool) -> Iterator[Status | None]:
    """Show a status line on a terminal. The text can be updated."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with console(stderr=True).status(text) as shown:
        yield shown


def print_json(tree: Any) -> None:
    print(json.dumps(json_values(tree), allow_nan=False, ensure_ascii=False), flush=True)


class _StandardErrorHandler(logging.Handler):
    """Handler that looks up ``sys.stderr`` for every record, since a progress bar replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        print(f"polyfed: {level}{visible(record.getMessage())}", file=sys.stderr)


def log_to_stderr(quiet: bool) -> None:
    """Print the log on standard error: warnings, and the values chosen for settings that are auto."""
    log = logging.getLogger("polyfed")
    if not any(isinstance(handler, _StandardErrorHandler) for handler in log.handlers):
        log.addHandler(_StandardErrorHandler())
    log.setLevel(logging.ERROR if quiet else logging.INFO)
