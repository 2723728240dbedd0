"""Which learning rate, optimizer and batch size are used if none is given: those that the data set declares, else the model, else the general ones.

A learning rate belongs to its optimizer. If the rate, the optimizer or the momentum is given, the declared rate and optimizer are both skipped.

And which model is trained if none is named: the data set's own, in the variant that every requested method can work on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.data_types import DataSet, Federation, TrainsWith
from polyfed.core.method import Method
from polyfed.data.registry import data_sets
from polyfed.models import models
from polyfed.models.model_text import as_call, with_batch_norm
from polyfed.setting_facts import Unset
from polyfed.settings import FACTS, Settings
from polyfed.text import read_call

GIVEN, GENERAL = "given", "default"
"""Origins of a value that the user gave, and of one that neither the data set nor the model declares."""
NAMES = tuple(item.name for item in dataclasses.fields(TrainsWith))
RATE = ("lr", "optimizer")


def with_declared(settings: Settings, data: DataSet | Federation, model: Any = None) -> tuple[Settings, dict[str, str]]:
    """Return the settings with every value chosen, and the origin of each of the three.

    Args:
        settings: as they were given.
        data: the data set or federation that is trained on.
        model: the model, if it is not given by its name.
    """
    declared, origin = data.trains_with, data.name
    if declared is None and (model is None or isinstance(model, str)):
        declared, origin = _of_model(model or settings.model or data.default_model)
    return chosen(settings, declared, origin)


def with_declared_by_name(settings: Settings) -> Settings:
    """Return the settings with every value chosen by the names of data set and model alone: the data may be elsewhere."""
    name = settings.data.split("(")[0].strip()
    declaration = data_sets.find(name).extra.get("declaration") if name in data_sets else None
    if declaration is not None and declaration.trains_with is not None:
        return chosen(settings, declaration.trains_with, declaration.title)[0]
    return chosen(settings, *_of_model(settings.model or str(getattr(declaration, "default_model", ""))))[0]


def chosen(settings: Settings, declared: TrainsWith | None, origin: str) -> tuple[Settings, dict[str, str]]:
    """Return the settings with declared values for those that were not given, and the origin of each."""
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


def training_words(settings: Settings, origins: Mapping[str, str]) -> str:
    """Return the three values with their origins, as the tables print them.

    >>> training_words(Settings(lr=0.005), {"lr": "PACS", "optimizer": "PACS", "batch_size": "given"})
    'lr 0.005, sgd: from PACS; batch 32: given'
    """
    values = {"lr": f"lr {settings.lr:g}", "optimizer": settings.optimizer, "batch_size": f"batch {settings.batch_size}"}
    by_origin: dict[str, list[str]] = {}
    for name, text in values.items():
        by_origin.setdefault(origins.get(name, ""), []).append(text)
    words = {"": "", GIVEN: ": given", GENERAL: ": default"}
    return "; ".join(", ".join(texts) + words.get(origin, f": from {origin}") for origin, texts in by_origin.items())


def with_one_model(settings: Settings, default: str, methods: Sequence[Method]) -> Settings:
    """The settings with a model that all methods work on; where one is named, or the data set's own will do, as they are.

    Args:
        settings: of all runs.
        default: the data set's own model.
        methods: those that are run on it.
    """
    if settings.model or not any(method.facts.batch_norm for method in methods):
        return settings
    variant = with_batch_norm(default)
    return settings if variant == default else dataclasses.replace(settings, model=variant)


def why_this_model(asked: Settings, used: Settings, data: DataSet | Federation, who: str) -> list[str]:
    """A sentence where another variant than the data set's own was chosen for a method or several."""
    if asked.model == used.model:
        return []
    return [
        f"The model of {data.name}, {data.default_model}, has no batch norm, which {who} needs: {used.model} is trained. --model names another."
    ]
