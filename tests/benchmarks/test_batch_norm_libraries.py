"""The handling of batch norm is determined correctly from notes, and docs/batch-norm-in-libraries.md contains the findings."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from helpers.paths import BENCHMARKS, DOCS

HERE = BENCHMARKS / "batch_norm"
PAGE = DOCS / "batch-norm-in-libraries.md"
STATISTICS = ("running mean", "running variance")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder for notes; the script's modules are importable, and removed afterwards together with their hook."""
    monkeypatch.syspath_prepend(str(HERE))
    before = set(sys.modules)
    monkeypatch.setenv(load("two_clients").NOTES, str(tmp_path))
    yield tmp_path
    load("two_clients").watching.remove()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(HERE)):
            del sys.modules[name]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def trained(state: dict[str, Tensor], client: int) -> dict[str, Tensor]:
    two = load("two_clients")
    model = two.Net()
    model.load_state_dict(state)
    two.train(model, client)
    return copy.deepcopy(model.state_dict())


def mean(states: dict[int, dict[str, Tensor]], weights: dict[int, float]) -> dict[str, Tensor]:
    return {name: sum(weights[client] * state[name] for client, state in states.items()) for name in states[1]}


@pytest.mark.parametrize(("weights", "told"), [({1: 1 / 6, 2: 5 / 6}, "mean"), ({1: 0.5, 2: 0.5}, "unweighted mean")])
def test_a_mean_of_all_entries_is_told(notes: Path, weights: dict[int, float], told: str) -> None:
    two = load("two_clients")
    state = two.Net().state_dict()
    for _ in range(two.ROUNDS):
        state = mean({client: trained(state, client) for client in two.SAMPLES}, weights)
    two.write("server", {name: value.tolist() for name, value in state.items()})
    found = load("findings").found_in(notes)
    assert {found.clients[group] for group in ("weights", "scale and shift", *STATISTICS)} == {told}
    # 1 and 5 batches: 4.33 by samples, which a client reads as 4; 3 with equal clients.
    assert found.clients["batches counted"] == told + (", truncated to an integer" if told == "mean" else "")
    assert found.server["batches counted"] == told


def test_statistics_that_stay_are_told(notes: Path) -> None:
    two = load("two_clients")
    state, own = two.Net().state_dict(), {client: {} for client in two.SAMPLES}
    for _ in range(two.ROUNDS):
        replies = {client: trained({**state, **own[client]}, client) for client in two.SAMPLES}
        own = {
            client: {name: value for name, value in reply.items() if "running" in name or "num" in name}
            for client, reply in replies.items()
        }
        state = {**mean(replies, {1: 1 / 6, 2: 5 / 6}), **{name: value for name, value in state.items() if name in own[1]}}
    two.write("server", {name: value.tolist() for name, value in state.items() if "norm" not in name})
    found = load("findings").found_in(notes)
    assert {found.clients[group] for group in (*STATISTICS, "batches counted")} == {"local"}
    assert found.clients["scale and shift"] == "mean"
    assert found.server["running mean"] == "missing" and found.server["weights"] == "mean"


def test_what_two_explanations_fit_is_refused(notes: Path) -> None:
    findings = load("findings")
    with pytest.raises(ValueError, match="running_mean: one of a, b should explain"):
        findings.the_one({"a": [(1.0, 1.0)], "b": [(1.0, 1.0)]}, "running_mean")


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "findings.json").read_text())
    return found


@pytest.mark.parametrize("method", ["fedavg", 'fedavg(statistics="local")', 'fedavg(statistics="drop")', "fedbn"])
def test_polyfeds_rows_still_hold(notes: Path, method: str) -> None:
    load("with_polyfed").main(method)
    found = load("findings").found_in(notes)
    row = recorded()["ways"][f"polyfed, `{method}`"]
    assert (found.clients, found.server) == (row["clients"], row["server"])


def test_the_page_is_written_from_what_was_found(notes: Path) -> None:
    script = load("compare_libraries")
    assert script.tables(recorded()) in PAGE.read_text(encoding="utf-8")
    assert [way.label for way in script.WAYS] == list(recorded()["ways"])
    assert not [label for label, facts in recorded()["ways"].items() if "failed" in facts]
