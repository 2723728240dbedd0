"""The benchmarks do what they say: the works build, the loop they compare with is the same algorithm, and the text follows from the data."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.paths import BENCHMARKS
from polyfed.core.client import batch_indices
from polyfed.core.seeds import generator
from polyfed.runs.experiment import Experiment


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize("letter", ["a", "c", "d"])
def test_the_loop_and_polyfed_give_the_same_average(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    works, side = load("works"), load("side_polyfed")
    work = works.chosen(letter, quick=True)
    settings = side.settings_for(work, 1)
    data, model = works.federation(work), works.build_model(work)
    # Both prepare images alike up to rounding, but one rounding can flip a ReLU or a pooling tie of ResNet-18: compare on equal inputs.
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 3, 1, 1)
    torch.testing.assert_close(works.prepared(pixels), data.preparation.for_training(pixels), rtol=0, atol=3e-7)
    monkeypatch.setattr(works, "prepared", data.preparation.for_training)
    state = copy.deepcopy(model.state_dict())
    experiment = Experiment(settings, data, "fedavg", copy.deepcopy(model))
    experiment.server.start_round(1, 0)
    chosen = experiment.server.sample_clients()
    experiment.server.round = 0
    cohort = [client for client in data.clients if client.id in chosen]
    assert len(cohort) == work.a_round

    def order(client: Any) -> Any:
        return batch_indices(len(client.train), settings, True, generator(settings.seed, "client", 1, client.id), client.id)

    by_hand = works.hand_written_round(model, state, cohort, order)
    experiment.train()
    for name, value in experiment.server.state.items():
        torch.testing.assert_close(value, by_hand[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    works = load("works")
    sizes = [len(chunk) for chunk in works.batch_positions(37, 2)]
    assert sizes == [2] * 17 + [3]


@pytest.mark.slow
def test_contenders_run_rounds_when_told(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_speed.py"), "--quick", "--works", "a", "--contenders", "loop,polyfed"]
    out = tmp_path / "results.json"
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=300, check=False, env=plain_environment()
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["speed"]["a"]
    for name in ("loop", "polyfed"):
        record = found["contenders"][name]
        assert len(record["turns"]) == 1 and record["turns"][0] > 0
        assert record["first_round_ended_after"] > record["first_round"] > 0
        assert record["memory"] > 50 * 2**20
    assert str(tmp_path) not in found["measured"]["command"]


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_ordinary_path_is_not_reported_as_a_fast_one() -> None:
    side, turns, works = load("side_polyfed"), load("turns"), load("works")
    work = works.chosen("a", quick=True)
    experiment = Experiment(side.settings_for(work, 1), works.federation(work), "fedavg", works.build_model(work))
    side.require_own_path(experiment, {})
    for options in ({"backend": "fused"}, {"workers": "2"}):
        with pytest.raises(turns.CannotTakePart):
            side.require_own_path(experiment, options)


def record(turns: list[float], first: float = 10.0, memory: int = 2**30) -> dict[str, Any]:
    return {"turns": turns, "processor": turns, "memory": memory, "first_round_ended_after": first, "first_round": first - 5}


def measured() -> dict[str, Any]:
    return {
        "date": "2026-01-01 00:00 UTC",
        "commit": "abc",
        "command": "benchmarks/bench_speed.py",
        "machine": "M",
        "load_before": 0.0,
        "versions": {"torch": "2"},
    }


def example() -> dict[str, Any]:
    large = {"loop": record([10.0, 10.0, 10.0]), "polyfed": record([10.0, 10.2, 10.4]), "workers": record([7.0, 7.0, 7.0])}
    small = {
        "loop": record([1.0, 1.0, 1.0]),
        "workers": record([0.5, 0.5, 0.5]),
        "fused": {"absent": "missing: not yet"},
        "pfl": record([1.2, 1.2, 1.2]),
        "pfl_2_threads": record([0.8, 0.8, 0.8]),
        "flower": record([1.0, 1.0, 1.0], first=40.0),
    }
    facts = {"repeats": 3, "rounds_a_turn": 1, "quick": False, "measured": measured()}
    counts = {
        "10": {"rounds": [1.0, 1.0], "grown": 100, "local": 100, "resident": 1},
        "10000": {"rounds": [1.0, 1.02], "grown": 300_000, "local": 100_000, "resident": 1},
    }
    return {
        "speed": {"a": {"title": "A", "contenders": small} | facts, "b": {"title": "B", "contenders": large} | facts},
        "growth": {
            "clients": {"counts": counts, "measured": measured()},
            "rounds": {"rounds": 200, "memory": [], "bytes_a_round": 100_000.0, "measured": measured()},
        },
    }


def test_the_text_has_the_figures_and_the_verdicts() -> None:
    text = load("write_results").document(example())
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert rows["(b) in process, at most 1.03 of the loop"].endswith("| 1.02 (1.01 to 1.03) | reached |")
    assert rows["(b) 2 workers, at most 0.68 of the loop"].endswith("| 0.70 (0.70 to 0.70) | **not reached** |")
    assert rows["(b) in process with 2 threads, at most 1.03 of the loop with 2 threads"].endswith("not measured |")
    best = rows["(a) at least 1.8 times the rounds per second of pfl-research at its best thread count"]
    assert best.endswith("| 1.60 (1.60 to 1.60), by polyfed, 2 workers | **not reached** |")
    assert rows["(a) 2 workers, not compiled, at least 1.3 times pfl-research at its best thread count"].endswith("| reached |")
    assert rows["(a) at least 2.5 times Flower's simulation"].endswith("| **not reached** |")
    assert "| 4.0 | reached |" in rows["(a) polyfed, 2 workers: first finished round at least 3 times sooner than Flower's"]
    assert rows["memory for 10,000 idle clients, less than 2 times their local entries"].endswith(
        "| 3.00 times | **not reached** |"
    )
    assert rows["no growth over 200 rounds (second half, by a line: less than 0.5 MB)"].endswith("| +9.54 MB | **not reached** |")
    assert "missing: not yet" in rows["polyfed, fused"]
