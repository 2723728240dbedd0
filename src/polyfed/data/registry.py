"""Registries of data sets and partitions."""

from __future__ import annotations

from typing import Any

from polyfed.core.data_types import DataSet
from polyfed.registry import Registry

data_sets: Registry[DataSet] = Registry("data set", "polyfed.data.sets", hyphens=True)
"""Functions that return a DataSet, one per file of ``polyfed/data/sets``."""

partitions: Registry[Any] = Registry("partition", "polyfed.data.partitions.partition")
"""Functions that split a DataSet across clients: ``(dataset, seed, **options) -> tuple[ClientData, ...]``."""
