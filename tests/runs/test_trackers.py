"""Trackers with real local stores; tests are skipped if a tracker is not installed."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

import polyfed
from polyfed.errors import PolyfedError, SettingError

DATA = "digits-mini(per_domain=16)"
QUICK = {"rounds": 2, "batch_size": 16, "evaluate_every": 1}
# Third-party packages emit deprecation warnings on import.
LONG = 120.0
"""Seconds before a hanging test fails."""
pytestmark = pytest.mark.filterwarnings("ignore")


def tracked(name: str, folder: Path) -> polyfed.Result:
    return polyfed.run(DATA, "fedbn", track=name, out=folder / "run", unseen="street", **QUICK)


def test_tensorboard_files_hold_the_scores(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = tracked("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    scores = events.Scalars("seen/pen/accuracy")
    assert [event.step for event in scores] == [1, 2]
    assert scores[-1].value == pytest.approx(result.accuracy["seen"]["pen"], abs=1e-6)
    assert [event.step for event in events.Scalars("training/loss")] == [1, 2]
    assert events.Scalars("unseen/street/macro_f1")[-1].value == pytest.approx(
        result.table("macro_f1")["unseen"]["street"], abs=1e-6
    )


def test_mlflow_store_holds_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/store.db")
    result = tracked("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(f"polyfed {DATA}")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "fedbn, seed 0" and run.info.status == "FINISHED" and run.data.params["batch_size"] == "16"
    history = client.get_metric_history(run.info.run_id, "seen/pen/accuracy")
    assert [one.step for one in history] == [1, 2]
    assert run.data.metrics["seen/pen/accuracy"] == pytest.approx(result.accuracy["seen"]["pen"])


def test_wandb_offline_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracked("wandb", tmp_path)
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + LONG
    while b"seen/pen/accuracy" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.2)  # wandb writes in a separate process
    content = file.read_bytes()
    assert b"seen/pen/accuracy" in content and b"fedbn" in content


def test_what_cannot_be_tracked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"track cannot be 'tensorbord'\. Did you mean tensorboard"):
        polyfed.run(DATA, track="tensorbord", **QUICK)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PolyfedError, match=re.escape("pip install 'polyfed[wandb]'")):
        tracked("wandb", tmp_path)
