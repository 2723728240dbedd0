"""Error handling: a one-line message, with exit code 2 for invalid input and 1 for internal errors; stack traces only with ``--debug``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from polyfed.cli.help import Group
from polyfed.cli.output import visible
from polyfed.errors import PolyfedError, SettingError, UnknownName

INTERNAL_ERROR, BAD_INPUT, STOPPED = 1, 2, 130
INTERNAL_ERROR_MESSAGE = "Internal error in polyfed, please report it"


class Stopped(KeyboardInterrupt):
    """The user interrupted a command. The message describes how to resume it."""


@contextmanager
def stoppable(advice: str | Callable[[], str]) -> Iterator[None]:
    """Print advice on how to resume if the user interrupts the block."""
    try:
        yield
    except KeyboardInterrupt as stop:
        text = advice if isinstance(advice, str) else advice()
        raise Stopped(f"Stopped. {text}" if text else "") from stop


class Guarded(Group):
    """Group that converts errors in its commands to messages and exit codes."""

    def unknown(self, typed: str) -> str:
        """Suggest a command instead of an unknown one."""
        raise NotImplementedError

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **extra: Any) -> click.Context:
        with _exit_on_error():
            invalid = next((word for word in args if "\0" in word), None)
            if invalid is not None:
                raise SettingError(f"{invalid!r} contains a NUL character.")
            return super().make_context(info_name, args, *others, **extra)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            raise UnknownName(f"Unknown command {args[0]!r}. {self.unknown(args[0])}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        with _exit_on_error():
            return super().invoke(ctx)


@contextmanager
def _exit_on_error() -> Iterator[None]:
    try:
        yield
    except PolyfedError as error:
        _exit(str(error), BAD_INPUT)
    except RecursionError:
        _exit("The input is nested too deeply. Use --debug for the location.", BAD_INPUT)
    except OSError as error:
        where = f" ({error.filename})" if error.filename is not None else ""
        _exit(f"System error: {error.strerror or error}{where}. Use --debug for the location.", BAD_INPUT)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.message)
        sys.exit(BAD_INPUT)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "polyfed"
        _exit(f"{_usage_message(error)} See {path} --help.", BAD_INPUT)
    except KeyboardInterrupt as stop:
        _exit(str(stop) or "Stopped.", STOPPED)
    except (click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        _exit(f"{INTERNAL_ERROR_MESSAGE}: {type(error).__name__}: {error}. Use --debug for the location.", INTERNAL_ERROR)


def _usage_message(error: click.UsageError) -> str:
    """Return the message of a usage error, with a suggestion."""
    from polyfed.cli.suggestions import extra_argument_suggestion, option_suggestion

    message = error.format_message()
    if error.ctx is not None and isinstance(error, click.NoSuchOption):
        suggestion = option_suggestion(error.option_name, error.ctx)
        return f"Unknown option {error.option_name}.{' ' * bool(suggestion)}{suggestion}"
    message = message if message.endswith((".", "?")) else f"{message}."
    if error.ctx is not None and "unexpected extra argument" in message:
        return f"{message} {extra_argument_suggestion(error.ctx)}"
    return message


def _exit(message: str, code: int) -> None:
    print(f"polyfed: {visible(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)
