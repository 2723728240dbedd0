"""Which backend the settings ask for, and how other packages bring one of their own."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from polyfed.backends.choose import ENTRY_POINTS, OWN
from polyfed.backends.in_process import InProcess
from polyfed.errors import SettingError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation


class Counting(InProcess):
    """Another package's backend."""


class Points(dict[str, Any]):
    """What importlib.metadata gives for a group."""

    @property
    def names(self) -> set[str]:
        return set(self)


class Point:
    def load(self) -> type[Counting]:
        return Counting


def experiment(backend: str) -> Experiment:
    return Experiment(Settings(batch_size=4, backend=backend), tiny_federation(), "fedavg", TinyNet())


def test_a_backend_registered_by_an_entry_point_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.entry_points

    def points(group: str) -> Any:
        return Points(counting=Point()) if group == ENTRY_POINTS else real(group=group)

    monkeypatch.setattr(importlib.metadata, "entry_points", points)
    assert type(experiment("counting").backend) is Counting


def test_an_unknown_backend_is_refused_by_the_nearest_name() -> None:
    with pytest.raises(SettingError, match=r"backend cannot be 'fusd'.*fused"):
        experiment("fusd")


def test_polyfed_registers_its_flower_backend_and_its_methods() -> None:
    assert "flower" in importlib.metadata.entry_points(group="polyfed.backends").names
    assert importlib.metadata.entry_points(group="polyfed.methods")["polyfed"].value == "polyfed.methods"
    assert set(OWN) == {"process", "fused", "auto", "debug"}
