"""What an unknown command or option probably meant: the nearest of ours, or what it is called here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

SYNONYMS = {
    "train": "run",
    "fit": "run",
    "start": "run",
    "benchmark": "compare",
    "list": "ls",
    "methods": "ls",
    "models": "ls",
    "test": "evaluate",
    "eval": "evaluate",
    "score": "evaluate",
    "infer": "predict",
    "classify": "predict",
    "search": "sweep",
    "diagnose": "doctor",
    "tune": "sweep",
    "continue": "resume",
    "restart": "resume",
    "describe": "show",
    "hash": "digest",
    "server": "serve",
    "client": "join",
}
"""What commands are called elsewhere."""
OPTION_SYNONYMS = {
    "learning-rate": "lr",
    "epochs": "local-epochs",
    "local-epoch": "local-epochs",
    "num-rounds": "rounds",
    "iterations": "rounds",
    "batch": "batch-size",
    "batchsize": "batch-size",
    "algorithm": "method",
    "strategy": "method",
    "algorithms": "methods",
    "network": "model",
    "architecture": "model",
    "arch": "model",
    "backbone": "model",
    "output": "out",
    "folder": "out",
    "config": "recipe",
    "gpu": "device",
    "cuda": "device",
    "processes": "workers",
    "jobs": "workers",
    "fraction-fit": "clients-per-round",
    "participation": "clients-per-round",
    "sample": "clients-per-round",
    "target": "unseen",
    "held-out": "unseen",
    "test-domain": "unseen",
    "data-dir": "root",
    "data-root": "root",
    "pretrained": "init",
    "weights-file": "init",
    "random-seed": "seed",
    "wd": "weight-decay",
    "scheduler": "schedule",
    "silent": "quiet",
}
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
