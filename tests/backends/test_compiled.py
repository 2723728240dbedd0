"""Compiled steps: the same values up to the last bits, used only if they save time, and a clear message without a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.random_images import federation, largest_difference
from polyfed.backends import compiled
from polyfed.core.client import Step
from polyfed.core.method import Method
from polyfed.core.part import Part
from polyfed.errors import ClientFailure, SettingError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings

needs_compiler = pytest.mark.skipif(bool(compiled.compiler_problem()), reason=compiled.compiler_problem())


def tiny_model() -> nn.Module:
    """A model that compiles quickly. No bias before batch norm: its gradient is nothing but rounding, which adam makes large."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def trained(method: str | Method, **changes: Any) -> Experiment:
    values = {"rounds": 1, "batch_size": 4, "lr": 0.05, "schedule": "cosine"} | changes
    experiment = Experiment(Settings(**values), federation((8, 8)), method, tiny_model())
    experiment.train()
    return experiment


@needs_compiler
@pytest.mark.parametrize(
    ("backend", "method", "changes"),
    [
        pytest.param("fused", "fedprox(mu=0.1)", {"momentum": 0.9, "rounds": 2}, marks=pytest.mark.slow),
        ("process", "fedbn + agc(clip=0.05)", {"optimizer": "adam", "lr": 0.01}),
    ],
)
def test_compiled_steps_give_the_same_numbers(
    backend: str,
    method: str,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="polyfed")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ordinary = trained(method, **changes)
    quick = trained(method, backend=backend, compile="on", **changes)
    assert largest_difference(quick, ordinary) < 1e-4
    assert sum("Compiled a training step" in record.getMessage() for record in caplog.records) == 1
    assert any(tmp_path.rglob("*.cpp"))


class Late(Part):
    """A term that changes in a later round or step, which a trace does not see."""

    def __init__(self, looks_at: str) -> None:
        self.looks_at = looks_at

    def __call__(self, step: Step) -> torch.Tensor:
        number = {"round": lambda: step.client.round, "step": lambda: step.index, "rate": lambda: step.client.lr}[self.looks_at]()
        return step.task_loss * (0.5 if number > 10 else 0.0)


@needs_compiler
@pytest.mark.parametrize(("looks_at", "expected"), [("round", "round"), ("step", "step"), ("rate", "round")])
def test_a_part_that_looks_at_the_round_or_the_step_is_not_compiled(looks_at: str, expected: str) -> None:
    method = Method("late", objective=(Late(looks_at),))
    with pytest.raises(ClientFailure, match=f"late cannot be compiled: CannotStack: it reads the {expected} number"):
        trained(method, compile="on")
    ordinary, auto = trained(method), trained(method, backend="fused")
    assert largest_difference(auto, ordinary) < 1e-4


def test_without_a_compiler_auto_goes_on_and_on_is_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="polyfed")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    ordinary, auto = trained("fedavg"), trained("fedavg", compile="auto")
    assert all(torch.equal(value, auto.server.state[name]) for name, value in ordinary.server.state.items())
    assert [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()] == [
        "Steps are not compiled: there is no C++ compiler (g++ or clang++) on this machine."
    ]
    with pytest.raises(SettingError, match=r"--compile on: there is no C\+\+ compiler.*--compile off"):
        trained("fedavg", compile="on")


@needs_compiler
def test_auto_does_not_compile_short_runs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="polyfed")
    ordinary, auto = trained("fedavg", rounds=4), trained("fedavg", rounds=4, compile="auto")
    assert "too little to save the 60 s of compiling" in caplog.text
    assert all(torch.equal(value, auto.server.state[name]) for name, value in ordinary.server.state.items())


def test_the_folder_of_compiled_programs_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.FOLDER, "/somewhere/else")
    assert compiled.cache_folder() == Path("/somewhere/else")
    monkeypatch.delenv(compiled.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert compiled.cache_folder() == Path("/cache/polyfed/compiled")
