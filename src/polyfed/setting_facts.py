"""Facts about a setting, declared on its field, and the validation of its values."""

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
"""Role of a setting. It affects the task, the split into clients, the length of a run, training, the identity of a run, the evaluation, the
last bits of results (rounding), or only paths and processes (machine)."""

MAX_RUNS = 10_000
"""Maximum number of seeds of a comparison, or random trials of a search."""


class Unset:
    """A default value that a data set or a model may replace. An equal value passed by the user is a plain value."""


class UnsetRate(Unset, float): ...


class UnsetCount(Unset, int): ...


class UnsetName(Unset, str): ...


@dataclass(frozen=True)
class Facts:
    """Description of a setting.

    Attributes:
        doc: Help text.
        group: Option group in the help.
        role: Aspect that the setting affects.
        choices: Valid values, if there are only a few.
        pattern: Regular expression of other valid values.
        takes: Description of the valid values, for error messages.
        minimum: Smallest valid number.
        maximum: Largest valid number.
        above: Exclusive lower bound.
        default: Default value.
        type: Type of the values, without None; list[str] for several names.
        optional: True if None is valid.
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
        """True if runs with different values compute different things."""
        return self.role in ("task", "partition", "budget", "training")

    def problem(self, name: str, value: Any) -> str:
        """Return an error message for an invalid value of the right type, or an empty string."""
        if value is None:
            return ""
        if self.choices or self.pattern:
            if value in self.choices or (self.pattern and re.fullmatch(self.pattern, value)):
                return ""
            return (
                f"{name} must be {self.takes}, got {value!r}."
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
            return f"{name} must be {'positive and finite' if high is None else f'above {above} and at most {high}'}, got {value}."
        if high is not None:
            return f"{name} must be between {low} and {high}, got {value}."
        if not finite:
            return f"{name} must be a finite number, got {value}."
        return f"{name} must {'not be negative' if low == 0 else f'be at least {low}'}, got {value}."

    def misfit(self, name: str, value: Any) -> str:
        """Return an error message for a value of the wrong type or size, or an empty string."""
        if not (self.optional and value is None) and not _fits(value, self.type):
            expected = {int: "an integer", float: "a number", str: "text"}.get(self.type, "a list of names")
            return f"{name} must be {expected}{' or None' if self.optional else ''}, got {value!r}."
        if isinstance(value, int) and abs(value) >= 2**31 and name != "seed":
            return f"{name} must be below 2^31, got a larger number."
        if any("\0" in text for text in (value if isinstance(value, tuple) else (value,)) if isinstance(text, str)):
            return f"{name} contains a NUL character."
        return ""


def setting(default: Any, doc: str, group: str, role: Role, **facts: Any) -> Any:
    """Declare a field with its facts: choices, pattern, takes, minimum, maximum, above."""
    return field(default=default, metadata={"facts": Facts(doc, group, role, **facts)})


def facts_of(settings: type) -> Mapping[str, Facts]:
    """Return the facts of each setting in a dataclass."""
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
    """Raise an error if a number of runs is below 1 or above ``MAX_RUNS``."""
    if count < 1:
        raise SettingError(f"{name} must be at least 1, got {count if count > -MAX_RUNS else 'a much smaller number'}.")
    if count > MAX_RUNS:
        raise SettingError(f"{name} must be at most {MAX_RUNS}, got a larger number.")


def _fits(value: Any, kind: Any) -> bool:
    if kind == list[str]:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
