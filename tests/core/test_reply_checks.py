"""Replies that are malformed or not finite are dropped, and too few good ones repeat the round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.recorded_runs import experiment_of, go_on
from polyfed.core.entries import entries_of, optimizer_entries
from polyfed.core.replies import problem_with
from polyfed.core.rounds import Payload, Reply
from polyfed.errors import TooFewReplies
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.testing import TinyNet

STATE, ENTRIES = TinyNet().state_dict(), entries_of(TinyNet())
NAMES = list(ENTRIES)


def good_reply() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in STATE.items()}


@settings(max_examples=600)
@given(data=st.data())
def test_malformed_replies_are_never_accepted(data: st.DataObject) -> None:
    entries: dict[str, Any] = good_reply()
    assert problem_with(entries, NAMES, ENTRIES) == ""
    name = data.draw(st.sampled_from(NAMES))
    value = entries[name]
    kind = data.draw(st.sampled_from(["missing", "extra", "shape", "dtype", "nan", "inf", "type", "empty", "all"]))
    if kind in ("nan", "inf") and not value.is_floating_point():
        name, value = "head.weight", entries["head.weight"]
    if kind == "missing":
        del entries[name]
    elif kind == "extra":
        entries[data.draw(st.text(max_size=8)) + "!"] = value
    elif kind == "shape":
        entries[name] = torch.zeros(*value.shape, 2, dtype=value.dtype)
    elif kind == "dtype":
        entries[name] = value.to(torch.float64 if value.dtype != torch.float64 else torch.float32)
    elif kind in ("nan", "inf"):
        flat = value.clone().reshape(-1)
        flat[data.draw(st.integers(0, flat.numel() - 1))] = float(kind) * data.draw(st.sampled_from([1, -1]))
        entries[name] = flat.reshape(value.shape)
    elif kind == "type":
        entries[name] = data.draw(st.sampled_from([None, 3, "x", [1.0]]))
    elif kind == "empty":
        entries[name] = torch.zeros(0, dtype=value.dtype)
    else:
        entries = {}
    assert problem_with(entries, NAMES, ENTRIES) != ""


@pytest.mark.parametrize(("value", "why"), [(1e14, ""), (3e38, "holds values from 3e+38 to 3e+38, expected -1e+15 to 1e+15")])
def test_values_are_finite_and_so_are_their_squares(value: float, why: str) -> None:
    entries = good_reply() | {"head.weight": torch.full((3, 8), value)}
    assert problem_with(entries, NAMES, ENTRIES) == (f"'head.weight' {why}" if why else "")


def test_a_variance_is_not_negative() -> None:
    entries = good_reply() | {"stem.1.running_var": torch.full((8,), -1e-3)}
    assert "'stem.1.running_var' holds values from -0.001 to -0.001, expected 0" in problem_with(entries, NAMES, ENTRIES)


@pytest.mark.parametrize(("buffer", "bad"), [("exp_avg_sq", -1.0), ("step", 0.0)])
def test_what_adam_takes_the_root_of_is_not_negative(buffer: str, bad: float) -> None:
    known = optimizer_entries({"head.bias": ENTRIES["head.bias"]}, ("exp_avg_sq", "step"))
    name = f"optimizer/{buffer}/head.bias"
    assert "expected" in problem_with({name: torch.full(known[name].shape, bad)}, [name], known)
    assert problem_with({name: torch.full(known[name].shape, 1.0)}, [name], known) == ""


def spoiled(experiment: Experiment, clients: set[str], rounds: set[int]) -> None:
    """Make some replies bad on their way."""
    carried = experiment.backend

    class Spoiling(type(carried)):  # type: ignore[misc]
        def __call__(self, ask: Any) -> Any:
            for reply in super().__call__(ask):
                if reply.client in clients and ask.round in rounds and ask.what == "train":
                    bad = {n: v * float("nan") if v.is_floating_point() else v for n, v in reply.entries.items()}
                    yield Reply(reply.client, Payload(bad, reply.extras), reply.samples)
                else:
                    yield reply

    carried.__class__ = Spoiling


def test_a_bad_reply_is_dropped_with_who_and_why_and_its_client_keeps_its_old_state(caplog: pytest.LogCaptureFixture) -> None:
    experiment = experiment_of("fedbn", rounds=2)
    spoiled(experiment, {"small"}, {2})
    seen: list[Tensor] = []
    with caplog.at_level("WARNING", logger="polyfed"):
        experiment.train(
            [
                lambda server: (
                    seen.append(experiment.backend.client_states["small"].entries["stem.1.running_mean"]) if server.round else None
                )
            ]
        )
    assert "client small" in caplog.text and "not finite" in caplog.text
    assert torch.equal(seen[0], seen[1])
    assert all(bool(torch.isfinite(v).all()) for v in experiment.server.state.values())


def test_too_few_good_replies_repeat_the_round_then_stop_with_everything_kept(tmp_path: Path) -> None:
    experiment = experiment_of("fedbn", rounds=3, retries=2)
    spoiled(experiment, {"small", "middle"}, {2})
    with pytest.raises(TooFewReplies, match="tried 3 times"):
        train_run(experiment, RunFolder(tmp_path / "run"))
    whole = train_run(experiment_of("fedbn", rounds=3, retries=2), RunFolder(tmp_path / "whole"))
    assert go_on(tmp_path / "run").digest == whole.digest
