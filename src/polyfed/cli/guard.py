"""Bad input gets one sentence on standard error and exit code 2, an unforeseen error exit code 1; a stack trace only with ``--debug``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from polyfed.cli.help import Group
from polyfed.cli.output import visible
from polyfed.errors import PolyfedError, SettingError, UnknownName

FAULT, BAD_INPUT, STOPPED = 1, 2, 130
OWN_FAULT = "This is a fault of polyfed, please report it"
"""What an unforeseen error is called."""


class Stopped(KeyboardInterrupt):
    """The user stopped the work; the message says how to go on."""


@contextmanager
def stoppable(how_to_go_on: str | Callable[[], str]) -> Iterator[None]:
    """Say how to go on if the user stops the work inside; a function that returns nothing says nothing."""
    try:
        yield
    except KeyboardInterrupt as stop:
        words = how_to_go_on if isinstance(how_to_go_on, str) else how_to_go_on()
        raise Stopped(f"stopped; {words}" if words else "") from stop


class Guarded(Group):
    """The group of all commands; what goes wrong in them ends here."""

    def unknown(self, typed: str) -> str:
        """Return what to type instead of an unknown command."""
        raise NotImplementedError

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **extra: Any) -> click.Context:
        with _one_sentence():
            bad = next((word for word in args if "\0" in word), None)
            if bad is not None:  # the system ends texts there
                raise SettingError(f"{bad!r} holds the character NUL, which no name and no file can have.")
            return super().make_context(info_name, args, *others, **extra)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            raise UnknownName(f"There is no command {args[0]!r}. {self.unknown(args[0])}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
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
    except RecursionError:
        _end("What was given is nested too deep to be read. --debug shows where.", BAD_INPUT)
    except OSError as error:
        where = f" ({error.filename})" if error.filename is not None else ""
        _end(f"The system refused: {error.strerror or error}{where}. --debug shows where.", BAD_INPUT)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.message)
        sys.exit(BAD_INPUT)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "polyfed"
        _end(f"{_usage_sentence(error)} See {path} --help.", BAD_INPUT)
    except KeyboardInterrupt as stop:
        _end(str(stop) or "stopped.", STOPPED)
    except (click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        _end(f"{OWN_FAULT}: {type(error).__name__}: {error}. --debug shows where.", FAULT)


def _usage_sentence(error: click.UsageError) -> str:
    """Return what is wrong with how the command was called, and what was probably meant."""
    from polyfed.cli.suggestions import extra_argument_suggestion, option_suggestion

    sentence = error.format_message()
    if error.ctx is not None and isinstance(error, click.NoSuchOption):
        suggestion = option_suggestion(error.option_name, error.ctx)
        return f"There is no option {error.option_name}.{' ' * bool(suggestion)}{suggestion}"
    ended = sentence if sentence.endswith((".", "?")) else f"{sentence}."
    if error.ctx is not None and "unexpected extra argument" in sentence:
        return f"{ended} {extra_argument_suggestion(error.ctx)}"
    return ended


def _end(sentence: str, code: int) -> None:
    print(f"polyfed: {visible(' '.join(sentence.split()))}", file=sys.stderr)
    sys.exit(code)
