"""Bad input gets one sentence on standard error and exit code 2; a stack trace only with ``--debug``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from polyfed.errors import PolyfedError

BAD_INPUT, STOPPED = 2, 130

# typer 0.15 raises click's errors, later ones raise those of a click they carry along; both name the same parent.
UsageError: Any = typer.BadParameter.__mro__[1]


class Stopped(KeyboardInterrupt):
    """The user stopped the work; the message says how to go on."""


@contextmanager
def stoppable(how_to_go_on: str) -> Iterator[None]:
    """Say how to go on when the user stops the work inside."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Stopped(f"stopped; {how_to_go_on}") from stop


class Guarded(TyperGroup):
    """The group of all commands; what goes wrong in them ends here."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the global options."""
        with _one_sentence():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        with _one_sentence():
            return super().invoke(ctx)


@contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except PolyfedError as error:
        _end(str(error), BAD_INPUT)
    except UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "polyfed"
        sentence = error.format_message()
        _end(f"{sentence}{'' if sentence.endswith(('.', '?')) else '.'} See {path} --help.", BAD_INPUT)
    except KeyboardInterrupt as stop:
        _end(str(stop) or "stopped.", STOPPED)


def _end(sentence: str, code: int) -> None:
    print(f"polyfed: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(code)
