"""Shell completion of names. It reads a file of names (``names.json``, written by docs/generate.py) and imports no torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from polyfed.studies.report.kinds import LISTS

NAMES = Path(__file__).with_name("names.json")
Complete = Callable[[str], list[str]]


@functools.cache
def names_of(kind: str) -> list[str]:
    """All names of a kind that polyfed ships."""
    found: list[str] = json.loads(NAMES.read_text(encoding="utf-8"))[kind]
    return found


def completions(incomplete: str, names: Iterable[str], joined_by: str = "") -> list[str]:
    """The texts that a text may become: its last name is completed, what stands before stays.

    >>> completions("fedbn + fedp", ["fedavg", "fedprox"], "+")
    ['fedbn + fedprox']
    """
    start = max((incomplete.rfind(sign) + 1 for sign in joined_by), default=0)
    before, last = incomplete[:start], incomplete[start:]
    blanks = last[: len(last) - len(last.lstrip())]
    return [f"{before}{blanks}{name}" for name in names if name.startswith(last.lstrip())]


def complete(kind: str, joined_by: str = "") -> Complete:
    """A function for typer that completes names of a kind."""

    def completed(incomplete: str) -> list[str]:
        return completions(incomplete, names_of(kind), joined_by)

    return completed


def complete_any(incomplete: str) -> list[str]:
    """Everything that ``polyfed show`` knows."""
    return completions(incomplete, dict.fromkeys(name for kind in LISTS for name in names_of(kind)))


def complete_kind(incomplete: str) -> list[str]:
    """The kinds that ``polyfed ls`` lists."""
    return completions(incomplete, LISTS)


OF_SETTINGS: dict[str, Complete] = {
    "method": complete("methods", "+"),
    "model": complete("models"),
    "partition": complete("partitions"),
    "loss": complete("losses"),
}
"""Settings whose values are names."""
