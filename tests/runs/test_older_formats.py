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


def without_decay(folder: Path) -> None:
    """Write the run folder of ``fixbn(decay=None)`` as it was before the method had the option."""
    text = (folder / "run.toml").read_text()
    assert text.count("decay=None") == 3
    (folder / "run.toml").write_text(text.replace(", decay=None", ""))
    for path in (folder / "checkpoint").glob("manifest-*.json"):
        manifest = json.loads(path.read_text())
        del manifest["seal"], manifest["notes"]["seals"]
        path.write_text(json.dumps(sealed(manifest)))


def test_a_fixbn_run_that_lacks_the_decay_goes_on_without_it(tmp_path: Path) -> None:
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.lifecycle import train_run

    settings = polyfed.Settings(data=DATA, method="fixbn(decay=None) + fedprox(mu=0.01)", rounds=3, checkpoint_every="1")
    whole = polyfed.run(DATA, settings.method, rounds=3)
    assert whole.digest != polyfed.run(DATA, "fixbn + fedprox(mu=0.01)", rounds=3).digest
    with pytest.raises(KeyboardInterrupt):
        train_run(Experiment(settings), RunFolder(tmp_path / "run"), observers=[stopped])
    without_decay(tmp_path / "run")
    resumed = polyfed.resume(tmp_path / "run")
    assert resumed.digest == whole.digest
    assert "decay=None" in str(resumed.experiment.method) and "decay=None" in RunFolder(tmp_path / "run").settings().method
    assert "decay=None" in polyfed.report(tmp_path / "run", tmp_path / "report.html").read_text()


def test_compare_does_not_reuse_a_fixbn_run_that_lacks_the_decay(tmp_path: Path) -> None:
    polyfed.compare(DATA, ["fixbn"], rounds=2, out=tmp_path / "new")
    (new,) = (path.parent for path in tmp_path.glob("new/*/run.toml"))
    old = polyfed.run(DATA, "fixbn(decay=None)", rounds=2, out=tmp_path / "old" / new.name)
    without_decay(tmp_path / "old" / new.name)
    polyfed.compare(DATA, ["fixbn"], rounds=2, out=tmp_path / "old")
    found = {path.parent.name: polyfed.open_run(path.parent).digest for path in tmp_path.glob("old/*/run.toml")}
    assert found == {new.name: old.digest, f"{new.name}-2": polyfed.open_run(new).digest}


def test_a_run_of_the_first_format_goes_on(tmp_path: Path) -> None:
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.lifecycle import train_run

    settings = polyfed.Settings(data=DATA, method="fedbn", rounds=2, checkpoint_every="1")
    whole = polyfed.run(DATA, "fedbn", rounds=2)
    with pytest.raises(KeyboardInterrupt):
        train_run(Experiment(settings), RunFolder(tmp_path / "run"), observers=[stopped])
    as_format_1(tmp_path / "run")
    assert polyfed.resume(tmp_path / "run").digest == whole.digest
