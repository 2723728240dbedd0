"""What is known about one setting, declared on its field, and what is wrong with a value of it."""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from polyfed.errors import SettingError, nearest

Role: TypeAlias = Literal["task", "partition", "budget", "training", "run", "scoring", "rounding", "machine"]
"""What a setting decides: what is learned and tested; how data are split between clients; how long a run is; how a method trains; which of
several runs it is; when and how scores are computed; how it is computed (may change the last bits); where files are and processes run."""


MAX_RUNS = 10_000
"""Seeds of a comparison, or random trials of a search."""


class Unset:
    """A default that a data set or a model may replace. It works as its plain value; an equal value that is given is not one."""


class UnsetRate(Unset, float): ...


class UnsetCount(Unset, int): ...


class UnsetName(Unset, str): ...


@dataclass(frozen=True)
class Facts:
    """What is known about a setting.

    Attributes:
        doc: One sentence.
        group: Its group of options in help.
        role: What it decides.
        choices: Values it takes; empty if any.
        pattern: Regular expression of texts it takes besides its choices.
        takes: Texts it takes, in words.
        minimum: Smallest number it takes.
        maximum: Largest number it takes.
        above: Number that its values exceed.
        default: Value if none is given.
        type: Type of its values without None; list[str] for several names.
        optional: Its values may be None.
    """

    doc: str
    group: str
    role: Role
    choices: tuple[str, ...] = ()
    pattern: str = ""
    takes: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    default: Any = None
    type: Any = None
    optional: bool = False

    @property
    def changes_results(self) -> bool:
        """Return True if runs that differ in it compute different things."""
        return self.role in ("task", "partition", "budget", "training")

    def problem(self, name: str, value: Any) -> str:
        """Return what is wrong with a value of the right type; empty if nothing is."""
        if value is None:
            return ""
        if self.choices or self.pattern:
            if value in self.choices or (self.pattern and re.fullmatch(self.pattern, value)):
                return ""
            return (
                f"{name} takes {self.takes}, found {value!r}."
                if self.takes
                else f"{name} cannot be {value!r}. {nearest(value, self.choices)}"
            )
        low, high, above = self.minimum, self.maximum, self.above
        if low is None and above is None:
            return ""
        finite = not isinstance(value, float) or math.isfinite(value)
        if finite and (value > above if low is None else value >= low) and (high is None or value <= high):
            return ""
        if low is None:
            return (
                f"{name} must be {'positive and finite' if high is None else f'above {above} and at most {high}'}, found {value}."
            )
        if high is not None:
            return f"{name} must lie between {low} and {high}, found {value}."
        if not finite:
            return f"{name} must be a finite number, found {value}."
        return f"{name} must {'not be negative' if low == 0 else f'be at least {low}'}, found {value}."

    def misfit(self, name: str, value: Any) -> str:
        """Return why a value cannot be looked at further: its type or size; empty if it can."""
        if not (self.optional and value is None) and not _fits(value, self.type):
            words = {int: "a whole number", float: "a number", str: "text"}.get(self.type, "a list of names")
            return f"{name} takes {words}{' or nothing' if self.optional else ''}, found {value!r}."
        if isinstance(value, int) and abs(value) >= 2**31 and name != "seed":
            return f"{name} must be a number below 2^31, found a larger one."
        if any("\0" in text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str)):
            return f"{name} must not hold the character NUL."
        return ""


def setting(default: Any, doc: str, *, group: str, role: Role, **facts: Any) -> Any:
    """A field with its facts: choices, pattern, takes, minimum, maximum, above."""
    return field(default=default, metadata={"facts": Facts(doc, group, role, **facts)})


def facts_of(settings: type) -> Mapping[str, Facts]:
    """Return the facts of each setting of a dataclass, with its default and type."""
    found, hints = {}, typing.get_type_hints(settings)
    for item in fields(settings):
        if "facts" not in item.metadata:
            continue
        hint = hints[item.name]
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] if isinstance(hint, types.UnionType) else [hint]
        plain = list[str] if typing.get_origin(kinds[0]) is tuple else kinds[0]
        found[item.name] = replace(item.metadata["facts"], default=item.default, type=plain, optional=kinds != [hint])
    return types.MappingProxyType(found)


def require_count(name: str, count: int) -> None:
    """Refuse a number of runs that is none, or that no machine could hold."""
    if count < 1:
        raise SettingError(f"{name} must be at least 1, found {count if count > -MAX_RUNS else 'much less'}.")
    if count > MAX_RUNS:
        raise SettingError(f"{name} must be at most {MAX_RUNS}, found more.")


def _fits(value: Any, kind: Any) -> bool:
    if kind == list[str]:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
