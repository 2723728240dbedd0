"""Define the search space: settings and options of method parts, with the same number of trials for every method."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from polyfed.core.method import Method, join, methods, parse
from polyfed.errors import SettingError, nearest
from polyfed.setting_facts import require_count
from polyfed.settings import Settings, setting_names, with_changes
from polyfed.studies.compare.candidates import Candidate, common_to_all
from polyfed.text import Call

Values: TypeAlias = Mapping[str, Any]
"""One value per axis."""

RATE = "lr"
DIGITS = 3


@dataclass(frozen=True)
class Axis:
    """Values to try for a setting, such as ``lr``, or for an option of a method part, such as ``fedprox.mu``."""

    name: str
    values: tuple[Any, ...]

    @property
    def part(self) -> str:
        """Method part with this option; empty for a setting."""
        return self.name.partition(".")[0] if "." in self.name else ""

    @property
    def option(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_range(self) -> bool:
        """True if values between the smallest and the largest can be drawn."""
        return self.name == RATE and len(set(self.values)) > 1


def check_axes(axes: Sequence[Axis], methods: Sequence[Candidate], settings: Settings) -> None:
    """Raise SettingError if an axis cannot be searched."""
    texts = [one.text for one in methods]
    if not axes:
        raise SettingError("Nothing to search. Pass --lr 0.01,0.03,0.1 or --set-grid key=v1,v2.")
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SettingError(f"{twice} is searched twice. Pass all its values at once.")
    for axis in axes:
        if not axis.values:
            raise SettingError(f"{axis.name} has no values to try.")
        for one in methods:
            if axis.name in one.own:
                raise SettingError(f"{axis.name} is searched and also set for {one.text} ({one.label}). Keep one of them.")
        _check_setting(axis, settings) if not axis.part else _check_option(axis, texts)


def _check_setting(axis: Axis, settings: Settings) -> None:
    if axis.name not in setting_names():
        raise SettingError(f"Unknown setting {axis.name!r}. {nearest(axis.name, setting_names())}")
    if why := common_to_all(axis.name):
        raise SettingError(f"{axis.name} cannot be searched: {why}. Set it once, for the whole search.")
    for value in axis.values:
        with_changes(settings, {axis.name: value})
        if axis.name == RATE and not value > 0:
            raise SettingError(f"Learning rates must be positive, got {value}.")


def _check_option(axis: Axis, texts: Sequence[str]) -> None:
    parts = sorted({one.name for text in texts for one in parse(text).parts})
    if axis.part not in parts:
        raise SettingError(f"{axis.name}: none of the methods has a part {axis.part!r}. {nearest(axis.part, parts)}")
    for text in texts:
        for value in axis.values:
            with_option(parse(text), axis.part, axis.option, value)


def with_option(method: Method, part: str, option: str, value: Any) -> Method:
    """Replace one option of one part of a method; return it unchanged if it has no such part."""
    joined: list[Method] = []
    for one in method.parts:
        if one.name == part:
            record = methods.find(part)
            options = {**dict(one.options), option: value}
            record.bind(Call(part, (), options))
            one = record.extra["build_with"](**options)
        joined.append(one)
    return join(joined)


def applied(settings: Settings, text: str, values: Values) -> Settings:
    method = parse(text)
    for name, value in values.items():
        part, dot, option = name.partition(".")
        if dot:
            method = with_option(method, part, option, value)
    changes = {name: value for name, value in values.items() if "." not in name}
    return with_changes(settings, {**changes, "method": str(method)})


def axes_of_method(axes: Sequence[Axis], text: str) -> list[Axis]:
    """Return the axes that apply to a method: settings, and options of its parts."""
    parts = {one.name for one in parse(text).parts}
    return [axis for axis in axes if not axis.part or axis.part in parts]


def trials_of_each(texts: Sequence[str], axes: Sequence[Axis], trials: int | None) -> int:
    """Return the number of trials per method: the requested one, or the size of the largest grid if it is None."""
    if trials is not None:
        require_count("--trials", trials)
    count = max(len(grid(axes_of_method(axes, text))) for text in texts) if trials is None else trials
    for text in texts:
        own = axes_of_method(axes, text)
        possible = math.prod(_rates_between(axis) if axis.is_range else len(dict.fromkeys(axis.values)) for axis in own)
        if possible < count:
            has_range = any(axis.is_range for axis in own)
            advice = (
                "Widen the --lr range" if has_range else "Pass at least two --lr values, so that others can be drawn between them"
            )
            raise too_few(text, possible, count, advice)
    return count


def grid(axes: Sequence[Axis]) -> list[Values]:
    """Return all combinations; the last axis varies fastest."""
    names = [axis.name for axis in axes]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*(dict.fromkeys(axis.values) for axis in axes))]


def too_few(text: str, found: int, count: int, advice: str) -> SettingError:
    return SettingError(
        f"{text} has fewer combinations ({found}) than trials ({count}), and every method gets the same number of trials. "
        f"{advice}, or lower --trials."
    )


def rounded_rate(axis: Axis, rate: float) -> float:
    """Round a learning rate to three significant digits within the range; given values are not rounded."""
    if rate in axis.values:
        return rate
    low, high = min(axis.values), max(axis.values)
    return float(min(max(float(f"{rate:.{DIGITS}g}"), low), high))


def _rates_between(axis: Axis) -> int:
    """Return the number of different learning rates that can be proposed.

    >>> _rates_between(Axis("lr", (0.1, 0.101))), _rates_between(Axis("lr", (0.1, 1.0)))
    (2, 901)
    """
    return _rank(max(axis.values)) - _rank(min(axis.values)) + 1


def _rank(rate: float) -> int:
    """Return the rank of a rate among all rates with three significant digits."""
    mantissa, exponent = f"{rate:.{DIGITS - 1}e}".split("e")
    in_decade = int(10 ** (DIGITS - 1))
    return int(exponent) * 9 * in_decade + round(float(mantissa) * in_decade) - in_decade
