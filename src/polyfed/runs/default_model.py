"""Which model is trained where none is named: the data set's own, in the variant that every method asked for can work on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyfed.core.data_types import DataSet, Federation
from polyfed.core.method import Method
from polyfed.models.model_text import with_batch_norm
from polyfed.settings import Settings


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
