"""Optimizer, loss, schedule and augmentation as objects of Python, in the place of their names.

A run records them by their import path where they have one, and says that they were given: to go on with it, they are needed again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyfed.errors import SettingError, nearest

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

NAMES = ("optimizer", "loss", "schedule", "augment")
FITTING: Mapping[str, str] = {"backend": "process", "workers": "1", "compile": "off"}
"""Settings under which objects of this process reach the clients."""


def parted(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings by value, and objects in the place of settings."""
    objects = {name: value for name, value in values.items() if name in NAMES and value is not None and not isinstance(value, str)}
    for name, value in objects.items():
        if not callable(value):
            raise SettingError(f"{name} takes a name or something that can be called, found {type(value).__name__}.")
    return {name: value for name, value in values.items() if name not in objects}, objects


def checked(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Objects to go on with; other names are refused."""
    for name in objects:
        if name not in NAMES:
            raise SettingError(f"There is no argument {name!r}. {nearest(name, NAMES)}")
    plain, found = parted(objects)
    if any(value is not None for value in plain.values()):
        raise SettingError(f"{' and '.join(plain)}: the settings of a run do not change when it goes on. Give objects only.")
    return found


def give(experiment: Experiment, objects: Mapping[str, Any]) -> None:
    """Put the objects in the place of what the settings name."""
    if not objects:
        return
    wrong = [
        f"{name}={getattr(experiment.settings, name)!r}" for name, v in FITTING.items() if getattr(experiment.settings, name) != v
    ]
    if wrong:
        raise SettingError(
            f"{' and '.join(objects)} given as objects cannot be used with {' and '.join(wrong)}. Leave that out, or name them by text."
        )
    bench = experiment.bench  # classes of torch are made without options
    if "loss" in objects:
        given = objects["loss"]
        bench.loss = given() if isinstance(given, type) else given
    if "optimizer" in objects:
        bench.own_optimizer = objects["optimizer"]
    if "schedule" in objects:
        bench.own_schedule = _schedule(objects["schedule"], experiment.settings.rounds)
        _factor(bench.own_schedule, experiment.settings.rounds)
    if "augment" in objects:
        given = objects["augment"]
        made = given() if isinstance(given, type) and issubclass(given, nn.Module) else given
        bench.preparation = dataclasses.replace(bench.preparation, augment=made)
    experiment.given = [*experiment.given, *(name for name in objects if name not in experiment.given)]
    experiment.objects = {name: _import_path(value) for name, value in objects.items()}


def _schedule(given: Any, rounds: int) -> Callable[[int, int], float]:
    """A function of a round and the number of rounds; a scheduler of torch takes a step after each round."""
    kind = given.func if isinstance(given, functools.partial) else given
    if not isinstance(kind, type):
        made: Callable[[int, int], float] = given
        return made
    from torch.optim import SGD
    from torch.optim.lr_scheduler import LRScheduler

    if not issubclass(kind, LRScheduler):
        raise SettingError(f"schedule takes a function or a scheduler of torch, found the class {kind.__name__}.")
    optimizer, factors = SGD([nn.Parameter(torch.zeros(1))], lr=1.0), list[float]()
    try:
        scheduler = given(optimizer)
        for _ in range(rounds):
            factors.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    except TypeError as error:
        raise SettingError(
            f"{kind.__name__} cannot be made with an optimizer alone and take a step after each round: {error}. Give what it lacks "
            f"with functools.partial({kind.__name__}, ...), or a function of a round and the number of rounds."
        ) from error
    return lambda number, _: factors[min(max(number, 1), rounds) - 1]


def _factor(schedule: Callable[[int, int], float], rounds: int) -> None:
    """Refuse a schedule that does not give a number, before anything is trained."""
    try:
        factor = schedule(1, rounds)
    except TypeError as error:
        raise SettingError(
            f"schedule is called with a round and the number of rounds, and gives a factor on lr: {error}."
        ) from error
    if not isinstance(factor, int | float):
        raise SettingError(f"schedule gives a factor on lr, found {type(factor).__name__}.")


def _import_path(value: Any) -> str:
    """Where an object can be imported from, ``module:name``; else what it looks like."""
    if isinstance(value, functools.partial):
        given = [*map(repr, value.args), *(f"{name}={one!r}" for name, one in value.keywords.items())]
        return f"{_import_path(value.func)}({', '.join(given)})"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and "<" not in name and module != "__main__":
        return f"{module}:{name}"
    kind = type(value)
    described = f"{kind.__module__}:{kind.__qualname__}" if not isinstance(value, type) and name is None else f"{module}:{name}"
    return f"{described} {value!r}" if isinstance(value, nn.Module | torch.nn.modules.loss._Loss) else described
