"""A search begun in Python: data, methods and values to try in, a finished search out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.data_types import DataSet, Federation
from polyfed.errors import SettingError
from polyfed.runs.assemble import build_data_set
from polyfed.runs.callbacks.callback import Callback
from polyfed.runs.experiment import settings_given
from polyfed.runs.folder.paths import data_slug
from polyfed.settings import Settings
from polyfed.studies.sweep.search import Sweep
from polyfed.studies.sweep.space import Axis
from polyfed.trust import code_in


def run_sweep(
    data: Any,
    methods: Any,
    search: Mapping[str, Sequence[Any]],
    model: Any,
    *,
    trials: int | None,
    sampler: str,
    halving: bool,
    seeds: int,
    hold_out: float | None,
    out: str | Path | None,
    callbacks: Sequence[Callback] | None,
    **values: Any,
) -> Sweep:
    """What ``polyfed.sweep`` does."""
    if "method" in values:
        raise SettingError("A search takes methods=[...], not method=.")
    if model is not None and not isinstance(model, str):
        raise SettingError(
            "A search finds its trials again by their settings, so the model is named: model='resnet20', or 'module.path:function'."
        )
    settings = settings_given(data, model, values)
    axes = axes_of(search)
    models = [each for axis in axes if axis.name == "model" for each in axis.values if isinstance(each, str)]
    trust = settings.trust.adding(code for each in models for code in code_in(model=each))
    settings = dataclasses.replace(settings, trust=trust)
    found = Sweep(
        settings,
        methods,
        axes,
        Path("runs") / f"sweep-{data_slug(settings.data)}" if out is None else out,
        trials=trials,
        sampler=sampler,
        halving=halving,
        seeds=seeds,
        hold_out=hold_out,
        data=None if isinstance(data, str | Path) else data_to_search(data, settings),
        callbacks=callbacks,
    )
    found.run()
    return found


def axes_of(search: Mapping[str, Sequence[Any]]) -> list[Axis]:
    """What is searched, by the names of settings and options."""
    for name, values in search.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise SettingError(f"search takes a list of values for {name}, such as [0.01, 0.1], found {values!r}.")
    return [Axis(name, tuple(values)) for name, values in search.items()]


def data_to_search(data: Any, settings: Settings) -> DataSet:
    """Data given in Python; those of a federation are dealt already, with its tests."""
    if isinstance(data, Federation):
        raise SettingError(
            "A search deals the data itself, with every test set out of reach, and a federation is dealt already. "
            "Give the data set it was made from (a name, a folder, a DataSet or {domain: (train, test)})."
        )
    return build_data_set(data, settings)
