"""What an unknown command or option probably meant: the nearest of ours, or what it is called here."""

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
"""What commands are called elsewhere."""
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
"""What options are called elsewhere."""
ALSO_ARGUMENTS = {"data": "DATA", "dataset": "DATA", "run": "RUN"}
"""What is no option here, but an argument."""
TWO_METHODS = 'Separate methods with ; and put them in quotes: --methods "fedavg; fedbn".'


def command_suggestion(typed: str, known: Collection[str]) -> str:
    """Return what to type instead of an unknown command.

    >>> [command_suggestion(typed, ["run", "compare"]) for typed in ("tain", "rnu", "xyzzy")]
    ['To train, use polyfed run.', 'Did you mean run?', 'polyfed --help lists all.']
    """
    found = _closest(_plain(typed), [*known, *SYNONYMS])
    if found is None:
        return "polyfed --help lists all."
    return f"Did you mean {found}?" if found in known else f"To {found}, use polyfed {SYNONYMS[found]}."


def option_suggestion(typed: str, ctx: Any) -> str:
    """Return what to type instead of an unknown option of the command that was called."""
    params = ctx.command.get_params(ctx)
    known = [option[2:] for param in params for option in (*param.opts, *param.secondary_opts) if option.startswith("--")]
    word = _plain(typed)
    place = ALSO_ARGUMENTS.get(word)
    if place is not None and any(place in argument for argument in _arguments(ctx)):
        return f"{place} is written without an option: {ctx.command_path} {place}."
    there = {name: ours for name, ours in OPTION_SYNONYMS.items() if ours in known}
    found = _closest(word, [*known, *there])
    return f"Did you mean --{there.get(found, found)}?" if found else ""


def extra_argument_suggestion(ctx: Any) -> str:
    """Return what to do about more arguments than the command takes: perhaps they are methods."""
    if any(param.name == "methods" for param in ctx.command.params):
        return TWO_METHODS
    return f"It takes {' '.join(_arguments(ctx)) or 'no arguments'}; put a text with spaces in quotes."


def _arguments(ctx: Any) -> list[str]:
    return [param.metavar or str(param.name).upper() for param in ctx.command.params if param.param_type_name == "argument"]


def _plain(text: str) -> str:
    return text.lstrip("-").replace("_", "-").lower()


def _closest(word: str, known: Iterable[str]) -> str | None:
    names = list(dict.fromkeys(known))
    if word in names:
        return word
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.6)), None)
