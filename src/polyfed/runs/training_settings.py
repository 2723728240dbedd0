"""Resolve training settings: declared defaults, the model variant, and Python objects that replace names.

Learning rate, optimizer and batch size that are not given are those that the data set declares, otherwise those that the model
declares, otherwise the general defaults. A learning rate belongs to its optimizer: if the rate, the optimizer or the momentum is given,
the declared rate and optimizer are both ignored.

A run records the import paths of objects (optimizer, loss, schedule, augmentation). Resuming it requires the same objects again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyfed.core.data_types import DataSet, Federation, TrainsWith
from polyfed.core.method import Method
from polyfed.data.registry import data_sets
from polyfed.errors import SettingError, nearest
from polyfed.models import models
from polyfed.models.model_text import as_call, with_batch_norm
from polyfed.setting_facts import Unset
from polyfed.settings import AUTO, FACTS, Settings
from polyfed.text import read_call

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

GIVEN, GENERAL = "given", "default"
"""Origins of a value that the user gave, and of a general default."""
VALIDATED = "chosen on validation data"
"""Origin of a value that ``polyfed sweep`` chose."""
NAMES = tuple(item.name for item in dataclasses.fields(TrainsWith))
RATE = ("lr", "optimizer")


def with_declared(settings: Settings, data: DataSet | Federation, model: Any = None) -> tuple[Settings, dict[str, str]]:
    """Return the resolved settings, and the origin of each value; ``model`` is a model given as an object."""
    declared, origin = data.trains_with, data.name
    if declared is None and (model is None or isinstance(model, str)):
        declared, origin = _of_model(model or settings.model or data.default_model)
    return _resolved(settings, declared, origin)


def with_declared_by_name(settings: Settings) -> Settings:
    """Return the resolved settings from the names of data set and model, without the data."""
    name = settings.data.split("(")[0].strip()
    declaration = data_sets.find(name).extra.get("declaration") if name in data_sets else None
    if declaration is not None and declaration.trains_with is not None:
        return _resolved(settings, declaration.trains_with, declaration.title)[0]
    return _resolved(settings, *_of_model(settings.model or str(getattr(declaration, "default_model", ""))))[0]


def _resolved(settings: Settings, declared: TrainsWith | None, origin: str) -> tuple[Settings, dict[str, str]]:
    free = [name for name in NAMES if isinstance(getattr(settings, name), Unset)]
    rate_is_free = all(name in free for name in RATE) and not settings.momentum
    taken = [name for name in free if declared is not None and (name not in RATE or rate_is_free)]
    values = {name: getattr(declared if name in taken else settings, name) for name in NAMES}
    plain = {name: FACTS[name].type(value) if isinstance(value, Unset) else value for name, value in values.items()}
    origins = {name: origin if name in taken else GENERAL if name in free else GIVEN for name in NAMES}
    return dataclasses.replace(settings, **plain), origins


def _of_model(text: str) -> tuple[TrainsWith | None, str]:
    """Return what a model declares, with its name; None if it is not registered or declares nothing."""
    call = as_call(text)
    name = call.split("(")[0].strip()
    if name not in models:
        return None, ""
    return models.find(name).extra.get("trains_with"), read_call(call).name


def describe_training(settings: Settings, origins: Mapping[str, str]) -> str:
    """Format the three values with their origins for tables.

    >>> describe_training(Settings(lr=0.005), {"lr": "PACS", "optimizer": "PACS", "batch_size": "given"})
    'lr 0.005, sgd: from PACS; batch 32: given'
    """
    values = {"lr": f"lr {settings.lr:g}", "optimizer": settings.optimizer, "batch_size": f"batch {settings.batch_size}"}
    by_origin: dict[str, list[str]] = {}
    for name, text in values.items():
        by_origin.setdefault(origins.get(name, ""), []).append(text)
    suffixes = {"": "", GIVEN: ": given", GENERAL: ": default", VALIDATED: f": {VALIDATED}"}
    return "; ".join(", ".join(texts) + suffixes.get(origin, f": from {origin}") for origin, texts in by_origin.items())


def with_one_model(settings: Settings, default: str, methods: Sequence[Method]) -> Settings:
    """Return settings with a model that all methods support: a variant of the default model, if none is given."""
    if settings.model or not any(method.facts.batch_norm for method in methods):
        return settings
    variant = with_batch_norm(default)
    return settings if variant == default else dataclasses.replace(settings, model=variant)


def why_this_model(requested: Settings, used: Settings, data: DataSet | Federation, who: str) -> list[str]:
    """Return a notice if ``with_one_model`` chose a variant of the default model."""
    if requested.model == used.model:
        return []
    return [
        f"Training {used.model} instead of {data.default_model}, the default model of {data.name}, which has no batch norm: {who} needs "
        "it. Use --model to choose another model."
    ]


OBJECT_SETTINGS = ("optimizer", "loss", "schedule", "augment")
ALLOWED_SETTINGS: Mapping[str, tuple[str, ...]] = {"backend": ("process",), "workers": ("1", AUTO), "compile": ("off",)}
"""Settings that objects allow. Other processes and compiled code cannot use objects, and ``auto`` workers then stay in this process."""


def split_objects(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into plain values and objects that replace names."""
    objects = {n: value for n, value in values.items() if n in OBJECT_SETTINGS and value is not None and not isinstance(value, str)}
    for name, value in objects.items():
        if not callable(value):
            raise SettingError(f"{name} must be a name or a callable, got {type(value).__name__}.")
    return {name: value for name, value in values.items() if name not in objects}, objects


def objects_for_resuming(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects for a resumed run, whose other settings cannot change."""
    for name in arguments:
        if name not in OBJECT_SETTINGS:
            raise SettingError(f"Unknown argument {name!r}. {nearest(name, OBJECT_SETTINGS)}")
    plain, objects = split_objects(arguments)
    if any(value is not None for value in plain.values()):
        raise SettingError(f"{' and '.join(plain)}: the settings of a resumed run cannot be changed. Pass only objects.")
    return objects


def use_objects(experiment: Experiment, objects: Mapping[str, Any]) -> None:
    """Replace the named optimizer, loss, schedule and augmentation of an experiment with objects."""
    if not objects:
        return
    settings, bench = experiment.settings, experiment.bench
    used = {name: getattr(settings, name) for name in ALLOWED_SETTINGS}
    wrong = [f"{name}={value!r}" for name, value in used.items() if value not in ALLOWED_SETTINGS[name]]
    if wrong:
        raise SettingError(
            f"{' and '.join(objects)} given as objects cannot be used with {' and '.join(wrong)}. Remove this setting, or pass names."
        )
    bench.uses_objects = True
    if "loss" in objects:
        loss = objects["loss"]
        bench.loss = loss() if isinstance(loss, type) else loss
    if "optimizer" in objects:
        bench.own_optimizer = objects["optimizer"]
    if "schedule" in objects:
        bench.own_schedule = _schedule(objects["schedule"], settings.rounds)
        _check_schedule(bench.own_schedule, settings.rounds)
    if "augment" in objects:
        augment = objects["augment"]
        made = augment() if isinstance(augment, type) and issubclass(augment, nn.Module) else augment
        bench.preparation = dataclasses.replace(bench.preparation, augment=made)
    experiment.given = [*experiment.given, *(name for name in objects if name not in experiment.given)]
    experiment.objects = {name: _import_path(value) for name, value in objects.items()}


def _schedule(given: Any, rounds: int) -> Callable[[int, int], float]:
    """Return a function of the round and the number of rounds; a torch scheduler takes one step per round."""
    kind = given.func if isinstance(given, functools.partial) else given
    if not isinstance(kind, type):
        made: Callable[[int, int], float] = given
        return made
    from torch.optim import SGD
    from torch.optim.lr_scheduler import LRScheduler

    if not issubclass(kind, LRScheduler):
        raise SettingError(f"schedule must be a function or a torch scheduler, got the class {kind.__name__}.")
    optimizer, factors = SGD([nn.Parameter(torch.zeros(1))], lr=1.0), list[float]()
    try:
        scheduler = given(optimizer)
        for _ in range(rounds):
            factors.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
    except TypeError as error:
        raise SettingError(
            f"{kind.__name__} needs more than an optimizer, or cannot take a step after each round: {error}. Pass missing arguments with "
            f"functools.partial({kind.__name__}, ...), or use a function of the round and the number of rounds."
        ) from error
    return lambda number, _: factors[min(max(number, 1), rounds) - 1]


def _check_schedule(schedule: Callable[[int, int], float], rounds: int) -> None:
    try:
        factor = schedule(1, rounds)
    except TypeError as error:
        raise SettingError(
            f"schedule must take the round and the number of rounds, and return a factor for lr: {error}."
        ) from error
    if not isinstance(factor, int | float):
        raise SettingError(f"schedule must return a factor for lr, got {type(factor).__name__}.")


def _import_path(value: Any) -> str:
    """Return ``module:name`` of an object, or a description if it cannot be imported."""
    if isinstance(value, functools.partial):
        arguments = [*map(repr, value.args), *(f"{name}={one!r}" for name, one in value.keywords.items())]
        return f"{_import_path(value.func)}({', '.join(arguments)})"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and name and "<" not in name and module != "__main__":
        return f"{module}:{name}"
    kind = type(value)
    described = f"{kind.__module__}:{kind.__qualname__}" if not isinstance(value, type) and name is None else f"{module}:{name}"
    return f"{described} {value!r}" if isinstance(value, nn.Module | torch.nn.modules.loss._Loss) else described
