"""Run folders that an older polyfed wrote are opened and resumed: names that changed since are read by their old ones."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import tomli_w

import polyfed
from polyfed.runs.manifest import sealed
from polyfed.runs.run_folder import RunFolder

DATA = "digits-mini(per_domain=20)"


def stopped(server: polyfed.Server) -> None:
    if server.round == 1:
        raise KeyboardInterrupt


def as_format_1(folder: Path) -> None:
    """Write a run folder as the first format had it."""
    document = tomllib.loads((folder / "run.toml").read_text())
    document["format"] = 1
    document["settings"]["deliver"] = document["settings"].pop("backend")
    document["method"]["leaves"] = document["method"].pop("data_derived_uploads")
    document["method"]["grain"] = document["method"].pop("granularity")
    (folder / "run.toml").write_text(tomli_w.dumps(document))
    for path in (folder / "checkpoint").glob("manifest-*.json"):
        manifest = json.loads(path.read_text())
        del manifest["seal"], manifest["notes"]["seals"]
        manifest["format"] = 1
        manifest["notes"]["ledger"] = manifest["notes"].pop("costs")
        path.write_text(json.dumps(sealed(manifest)))


def test_a_run_of_the_first_format_is_opened_and_reported(tmp_path: Path) -> None:
    made = polyfed.run(DATA, "fedbn", rounds=1, backend="debug", out=tmp_path / "run")
    as_format_1(tmp_path / "run")
    opened = polyfed.open_run(tmp_path / "run")
    assert opened.digest == made.digest and opened.accuracy == made.accuracy
    assert opened.experiment.costs.bytes == made.experiment.costs.bytes
    assert RunFolder(tmp_path / "run").settings().backend == "debug"
    assert polyfed.report(tmp_path / "run", tmp_path / "report.html").exists()


def test_a_run_of_the_first_format_goes_on(tmp_path: Path) -> None:
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.lifecycle import train_run

    settings = polyfed.Settings(data=DATA, method="fedbn", rounds=2, checkpoint_every="1")
    whole = polyfed.run(DATA, "fedbn", rounds=2)
    with pytest.raises(KeyboardInterrupt):
        train_run(Experiment(settings), RunFolder(tmp_path / "run"), observers=[stopped])
    as_format_1(tmp_path / "run")
    assert polyfed.resume(tmp_path / "run").digest == whole.digest
