"""What a search tries: settings and options of method parts, on a grid or at random, as often for every method."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from polyfed.core.method import Method, join, methods, parse
from polyfed.core.seeds import chooser
from polyfed.errors import SettingError, nearest
from polyfed.settings import Settings, require_count, setting_names, with_changes
from polyfed.text import Call

Values: TypeAlias = Mapping[str, Any]
"""One value for each name that is searched."""

RATE = "lr"
TASK = ("data", "root", "partition", "unseen", "unseen_part", "few_shot", "newcomer", "init", "head", "model", "load")
BUDGET = ("rounds", "total_epochs")
DRAWS_PER_TRIAL = 1000
MACHINERY = ("seed", "threads", "backend", "checkpoint_every", "evaluate_every", "evaluate_clients", "test_batch_size")


@dataclass(frozen=True)
class Axis:
    """Values to try for a setting, such as ``lr``, or for an option of a method's part, such as ``fedprox.mu``."""

    name: str
    values: tuple[Any, ...]

    @property
    def part(self) -> str:
        """The part of a method whose option it is; empty for a setting."""
        return self.name.partition(".")[0] if "." in self.name else ""

    @property
    def option(self) -> str:
        """The option or setting."""
        return self.name.rpartition(".")[2]

    @property
    def is_range(self) -> bool:
        """Whether values between the smallest and the largest can be drawn."""
        return self.name == RATE and len(set(self.values)) > 1


def check_axes(axes: Sequence[Axis], texts: Sequence[str], settings: Settings) -> None:
    """Refuse what cannot be searched, before anything is trained."""
    if not axes:
        raise SettingError("There is nothing to search: give --lr 0.01,0.03,0.1 or --set-grid key=v1,v2.")
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SettingError(f"{twice} is searched twice; give all its values at once.")
    for axis in axes:
        if not axis.values:
            raise SettingError(f"{axis.name} has no values to try.")
        _check_setting(axis, settings) if not axis.part else _check_option(axis, texts)


def _check_setting(axis: Axis, settings: Settings) -> None:
    if axis.name not in setting_names():
        raise SettingError(f"There is no setting {axis.name!r}. {nearest(axis.name, setting_names())}")
    if axis.name in (*TASK, *BUDGET, *MACHINERY, "method"):
        why = "the length of a run is the same for all" if axis.name in BUDGET else "it is no setting of training"
        raise SettingError(f"{axis.name} cannot be searched: {why}. Give it once, for the whole search.")
    for value in axis.values:
        with_changes(settings, {axis.name: value})
        if axis.name == RATE and not value > 0:
            raise SettingError(f"A learning rate to try must be positive, found {value}.")


def _check_option(axis: Axis, texts: Sequence[str]) -> None:
    parts = sorted({one.name for text in texts for one in parse(text).parts})
    if axis.part not in parts:
        raise SettingError(f"{axis.name}: no method of the search has a part {axis.part!r}. {nearest(axis.part, parts)}")
    for text in texts:
        for value in axis.values:
            with_option(parse(text), axis.part, axis.option, value)


def with_option(method: Method, part: str, option: str, value: Any) -> Method:
    """The method with one option of one of its parts replaced; unchanged if it has no such part."""
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
    """The settings of one trial."""
    method = parse(text)
    for name, value in values.items():
        part, dot, option = name.partition(".")
        if dot:
            method = with_option(method, part, option, value)
    changes = {name: value for name, value in values.items() if "." not in name}
    return with_changes(settings, {**changes, "method": str(method)})


def planned(texts: Sequence[str], axes: Sequence[Axis], random: int | None, seed: int) -> dict[str, list[Values]]:
    """What is tried for each method: as many trials for all.

    A grid holds every combination of the values that concern a method. Where one method has more combinations than another, the
    other's are made up to the same number by random ones, with learning rates drawn between the smallest and the largest.

    Args:
        texts: the methods.
        axes: what is searched.
        random: the number of random trials; None: a grid.
        seed: of the random choices, which are the same for all methods.
    """
    if random is not None:
        require_count("--random", random)
    own = {text: [axis for axis in axes if not axis.part or axis.part in _parts(text)] for text in texts}
    if random is not None:
        return {text: drawn(text, own[text], [], random, seed) for text in texts}
    grids = {text: grid(own[text]) for text in texts}
    most = max(len(combinations) for combinations in grids.values())
    return {text: drawn(text, own[text], grids[text], most, seed) for text in texts}


def _parts(text: str) -> set[str]:
    return {one.name for one in parse(text).parts}


def grid(axes: Sequence[Axis]) -> list[Values]:
    """Every combination, the last axis moving fastest."""
    names = [axis.name for axis in axes]
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*(dict.fromkeys(axis.values) for axis in axes))]


def drawn(text: str, axes: Sequence[Axis], start: Sequence[Values], count: int, seed: int) -> list[Values]:
    """The start, and random combinations up to ``count``, all different."""
    found = list(start)
    possible = grid(axes)
    if not any(axis.is_range for axis in axes):
        left = [values for values in possible if values not in found]
        if len(found) + len(left) < count:
            raise too_few(text, len(possible), count, "Give --lr two values or more, between which others can be drawn")
        return found + chooser(seed, "sweep").sample(left, count - len(found))
    for attempt in range(DRAWS_PER_TRIAL * count):
        if len(found) == count:
            break
        values = {axis.name: _draw(axis, seed, attempt) for axis in axes}
        if values not in found:
            found.append(values)
    if len(found) < count:
        raise too_few(text, len(found), count, "Give --lr values that lie farther apart")
    return found


def too_few(text: str, found: int, count: int, advice: str) -> SettingError:
    """The error that there is less to try than trials."""
    return SettingError(
        f"{text} has only {found} combinations to try, and every method gets the same number of trials ({count}). "
        f"{advice}, or --random with a smaller number."
    )


def _draw(axis: Axis, seed: int, attempt: int) -> Any:
    stream = chooser(seed, "sweep", axis.name, attempt)
    if not axis.is_range:
        return stream.choice(axis.values)
    low, high = min(axis.values), max(axis.values)
    rate = math.exp(stream.uniform(math.log(low), math.log(high)))
    return min(max(float(f"{rate:.3g}"), low), high)
