"""Error handling: a one-line message, with exit code 2 for invalid input and 1 for internal errors; stack traces only with ``--debug``."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from polyfed.cli.help import Group
from polyfed.cli.output import visible
from polyfed.errors import PolyfedError, SettingError, UnknownName

INTERNAL_ERROR, BAD_INPUT, STOPPED = 1, 2, 130
INTERNAL_ERROR_MESSAGE = "Internal error in polyfed (please report it)"


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


def _by_word(names: Mapping[str, str]) -> dict[str, str]:
    return {word: name for name, words in names.items() for word in words.split()}


SYNONYMS = _by_word(
    {
        "run": "train fit start",
        "compare": "benchmark",
        "ls": "list methods models",
        "evaluate": "test eval score",
        "predict": "infer classify",
        "sweep": "search tune",
        "doctor": "diagnose",
        "resume": "continue restart",
        "show": "describe",
        "digest": "hash",
        "serve": "server",
        "join": "client",
    }
)
"""Names of commands in other tools."""
OPTION_SYNONYMS = _by_word(
    {
        "lr": "learning-rate",
        "local-epochs": "epochs local-epoch",
        "rounds": "num-rounds iterations",
        "batch-size": "batch batchsize",
        "method": "algorithm strategy",
        "methods": "algorithms",
        "model": "network architecture arch backbone",
        "out": "output folder",
        "recipe": "config",
        "device": "gpu cuda",
        "workers": "processes jobs",
        "clients-per-round": "fraction-fit participation sample",
        "unseen": "target held-out test-domain",
        "root": "data-dir data-root",
        "init": "pretrained weights-file",
        "seed": "random-seed",
        "weight-decay": "wd",
        "schedule": "scheduler",
        "quiet": "silent",
    }
)
"""Names of options in other tools."""
ARGUMENTS = {"data": "DATA", "dataset": "DATA", "run": "RUN"}
"""Arguments that users may type as options."""
TWO_METHODS = 'Separate methods with ; and put them in quotes: --methods "fedavg; fedbn".'


def command_suggestion(typed: str, known: Collection[str]) -> str:
    """Suggest a command instead of an unknown one.

    >>> [command_suggestion(typed, ["run", "compare"]) for typed in ("tain", "rnu", "xyzzy")]
    ['To train, use polyfed run.', 'Did you mean run?', 'Run polyfed --help for a list.']
    """
    found = _closest(_plain(typed), [*known, *SYNONYMS])
    if found is None:
        return "Run polyfed --help for a list."
    return f"Did you mean {found}?" if found in known else f"To {found}, use polyfed {SYNONYMS[found]}."


def option_suggestion(typed: str, ctx: Any) -> str:
    """Suggest an option instead of an unknown one, or return an empty string."""
    params = ctx.command.get_params(ctx)
    known = [option[2:] for param in params for option in (*param.opts, *param.secondary_opts) if option.startswith("--")]
    word = _plain(typed)
    argument = ARGUMENTS.get(word)
    if argument is not None and any(argument in each for each in _arguments(ctx)):
        return f"{argument} is an argument: {ctx.command_path} {argument}."
    synonyms = {name: option for name, option in OPTION_SYNONYMS.items() if option in known}
    found = _closest(word, [*known, *synonyms])
    return f"Did you mean --{synonyms.get(found, found)}?" if found else ""


def extra_argument_suggestion(ctx: Any) -> str:
    """Suggest what to do about extra arguments."""
    if any(param.name == "methods" for param in ctx.command.params):
        return TWO_METHODS
    return f"The command takes {' '.join(_arguments(ctx)) or 'no arguments'}. Put arguments with spaces in quotes."


def _arguments(ctx: Any) -> list[str]:
    return [param.metavar or str(param.name).upper() for param in ctx.command.params if param.param_type_name == "argument"]


def _plain(text: str) -> str:
    return text.lstrip("-").replace("_", "-").lower()


def _closest(word: str, known: Iterable[str]) -> str | None:
    names = list(dict.fromkeys(known))
    if word in names:
        return word
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.6)), None)
