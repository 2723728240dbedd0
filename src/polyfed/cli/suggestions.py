"""Suggestions for unknown commands and options: the nearest name, or the name of a synonym."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any


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
