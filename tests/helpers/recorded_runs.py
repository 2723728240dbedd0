"""Runs of the tiny federation with a folder: stopped at some round, and resumed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_runs import tiny_net
from polyfed.core.method import Method
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.manifest import sealed
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.settings import Settings
from polyfed.testing import tiny_federation


def experiment_of(method: str | Method = "fedbn", **changes: Any) -> Experiment:
    """An experiment that writes a checkpoint every round."""
    values: dict[str, Any] = {"rounds": 4, "batch_size": 4, "checkpoint_every": "1"} | changes
    return Experiment(Settings(**values), tiny_federation(), method, tiny_net())


def sealed_again(folder: Path) -> None:
    """Make the checkpoints of a run fit its changed ``run.toml``, as whoever forges a folder would."""
    digest = hashlib.sha256((folder / "run.toml").read_bytes()).hexdigest()
    for path in sorted((folder / "checkpoint").glob("manifest-*.json")):
        manifest = json.loads(path.read_text())
        del manifest["seal"]
        manifest["notes"]["seals"]["run.toml"] = digest
        path.write_text(json.dumps(sealed(manifest)))


def without_seals(folder: Path) -> None:
    """Make the checkpoints of a run those of an older polyfed, which did not seal the files around them."""
    for path in (folder / "checkpoint").glob("manifest-*.json"):
        manifest = json.loads(path.read_text())
        del manifest["seal"], manifest["notes"]["seals"]
        path.write_text(json.dumps(sealed(manifest)))


class Killed(BaseException):
    """Stands for a kill at some instant."""


class Stopped(BaseException):
    """Stands for an interrupt."""


def run_until(folder: Path, last: int, method: str = "fedbn", **changes: Any) -> None:
    """Train, and be killed after a round."""
    experiment = experiment_of(method, **changes)
    folder_ = RunFolder(folder)

    def stop(server: Any) -> None:
        if server.round == last:
            raise Killed

    original = experiment.train
    experiment.train = lambda observers=(), **how: original([*observers, stop], **how)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        train_run(experiment, folder_)


def go_on(folder: Path) -> Any:
    """Resume quietly."""
    return resume(folder, data=tiny_federation(), how=Reopening(model=tiny_net()))
