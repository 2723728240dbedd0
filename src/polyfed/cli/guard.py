"""Bad input gets one sentence on standard error and exit code 2, an error nobody foresaw exit code 1; a stack trace only with ``--debug``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from polyfed.cli.visible import visible
from polyfed.errors import PolyfedError, SettingError, UnknownName, nearest

FAULT, BAD_INPUT, STOPPED = 1, 2, 130
OWN_FAULT = "This is a fault of polyfed, please report it"
"""What an error is called that nobody foresaw."""

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
            _refuse_nul(args)
            return super().make_context(*args, **kwargs)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; an unknown one is answered with what was probably meant."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            from polyfed.cli.suggestions import command_suggestion

            raise UnknownName(f"There is no command {args[0]!r}. {command_suggestion(args[0])}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        with _one_sentence():
            return super().invoke(ctx)


def _refuse_nul(args: Any) -> None:
    """No file, name or number has the character NUL in it, and the system ends texts there."""
    words = next((each for each in args if isinstance(each, list)), [])
    bad = next((word for word in words if "\0" in word), None)
    if bad is not None:
        raise SettingError(f"{bad!r} holds the character NUL, which no name and no file can have.")


@contextmanager
def _one_sentence() -> Iterator[None]:
    try:
        yield
    except PolyfedError as error:
        _end(str(error), BAD_INPUT)
    except RecursionError:
        _end("What was given is nested too deep to be read. --debug shows where.", BAD_INPUT)
    except OSError as error:
        where = f" ({error.filename})" if error.filename is not None else ""
        _end(f"The system refused: {error.strerror or error}{where}. --debug shows where.", BAD_INPUT)
    except UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "polyfed"
        _end(f"{_usage_sentence(error)} See {path} --help.", BAD_INPUT)
    except KeyboardInterrupt as stop:
        _end(str(stop) or "stopped.", STOPPED)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        _end(f"{OWN_FAULT}: {type(error).__name__}: {error}. --debug shows where.", FAULT)


def _usage_sentence(error: Any) -> str:
    """What is wrong with how the command was called, and what was probably meant."""
    from polyfed.cli.suggestions import extra_argument_suggestion, option_suggestion

    sentence = error.format_message()
    if error.ctx is not None and hasattr(error, "option_name") and not hasattr(error, "param"):
        suggestion = option_suggestion(error.option_name, error.ctx)
        return f"There is no option {error.option_name}.{' ' * bool(suggestion)}{suggestion}"
    if error.ctx is not None and sentence.startswith("No such command"):
        typed = sentence.split("'")[1]
        return f"There is no command {typed!r}. {nearest(typed, error.ctx.command.commands)}"
    ended = sentence if sentence.endswith((".", "?")) else f"{sentence}."
    if error.ctx is not None and "unexpected extra argument" in sentence:
        return f"{ended} {extra_argument_suggestion(error.ctx)}"
    return ended


def _end(sentence: str, code: int) -> None:
    print(f"polyfed: {visible(' '.join(sentence.split()))}", file=sys.stderr)
    sys.exit(code)
