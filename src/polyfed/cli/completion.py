"""Shell completion of names from ``names.json``, which docs/generate.py writes, without importing torch."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from polyfed.errors import SettingError
from polyfed.studies.report.words import LISTS

NAMES = Path(__file__).with_name("names.json")
Complete = Callable[[click.Context, click.Parameter, str], list[Any]]


@functools.cache
def names_of(kind: str) -> list[str]:
    """Return all built-in names of a kind."""
    found: list[str] = json.loads(NAMES.read_text(encoding="utf-8"))[kind]
    return found


def completions(incomplete: str, names: Iterable[str], joined_by: str = "") -> list[str]:
    """Return the completions of the last name in a text.

    >>> completions("fedbn + fedp", ["fedavg", "fedprox"], "+")
    ['fedbn + fedprox']
    """
    start = max((incomplete.rfind(sign) + 1 for sign in joined_by), default=0)
    before, last = incomplete[:start], incomplete[start:]
    blanks = last[: len(last) - len(last.lstrip())]
    return [f"{before}{blanks}{name}" for name in names if name.startswith(last.lstrip())]


def complete(kind: str, joined_by: str = "") -> Complete:
    """Return a completion function for click."""
    return lambda _context, _param, incomplete: completions(incomplete, names_of(kind), joined_by)


def complete_any(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
    """Complete the names that ``polyfed show`` accepts."""
    return completions(incomplete, dict.fromkeys(name for kind in LISTS for name in names_of(kind)))


def complete_kind(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[Any]:
    return completions(incomplete, LISTS)


OF_SETTINGS: dict[str, Complete] = {
    "method": complete("methods", "+"),
    "model": complete("models"),
    "partition": complete("partitions"),
    "loss": complete("losses"),
}
"""Completion of settings that are names."""


def completion_script(app: click.Command) -> tuple[str, str]:
    """Return the name of the current shell and its completion script."""
    from click.shell_completion import get_completion_class

    shell = Path(os.environ.get("SHELL", "")).name
    made = get_completion_class(shell)
    if made is None:
        raise SettingError(f"Completion does not support the shell {shell!r} (from SHELL). Supported shells: bash, zsh and fish.")
    return shell, made(app, {}, "polyfed", "_POLYFED_COMPLETE").source()


def install(app: click.Command) -> str:
    """Install completion for the current shell and return a message about it."""
    shell, script = completion_script(app)
    home = Path.home()
    file, startup, line = {
        "bash": (home / ".bash_completions/polyfed.sh", home / ".bashrc", f"source '{home / '.bash_completions/polyfed.sh'}'"),
        "zsh": (home / ".zfunc/_polyfed", home / ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
        "fish": (home / ".config/fish/completions/polyfed.fish", None, ""),
    }[shell]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script, encoding="utf-8")
    if startup is not None:
        before = startup.read_text(encoding="utf-8") if startup.is_file() else ""
        if line not in before:
            startup.write_text(f"{before}\n{line}\n", encoding="utf-8")
    return f"Installed {shell} completion in {file}. Restart the terminal to use it."
