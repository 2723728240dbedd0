"""Run folders: run.toml is sufficient, and other folders are rejected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.recorded_runs import experiment_of, go_on, run_until, without_seals
from polyfed.api import run
from polyfed.errors import RunFolderError, SettingError
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run


def test_a_run_of_a_newer_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    train_run(experiment_of(rounds=1), RunFolder(tmp_path / "run"))
    without_seals(tmp_path / "run")
    text = (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "run" / "run.toml").write_text(text.replace("format = 2", "format = 99", 1))
    with pytest.raises(RunFolderError, match="newer version of polyfed"):
        RunFolder(tmp_path / "run").settings()


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train_run(experiment_of(rounds=1), RunFolder(tmp_path / "run"))
    with pytest.raises(RunFolderError, match="already contains a run"):
        train_run(experiment_of(rounds=1), RunFolder(tmp_path / "run"))
    with pytest.raises(RunFolderError, match="not a run"):
        RunFolder(tmp_path).settings()


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="Cannot write"):
        train_run(experiment_of(rounds=1), RunFolder(tmp_path / "file" / "run"))


def test_what_run_toml_says_is_enough_to_run_again(tmp_path: Path) -> None:
    experiment = experiment_of("fedbn + agc(clip=0.5)", rounds=2)
    train_run(experiment, RunFolder(tmp_path / "run"))
    document = RunFolder(tmp_path / "run").document()
    assert document["method"]["all_options"] == 'fedbn + agc(clip=0.5, eps=0.001, exclude="nothing", linear="outputs")'
    assert document["made_with"]["torch"] and document["plan"]
    assert RunFolder(tmp_path / "run").settings() == experiment.settings
    without_seals(tmp_path / "run")
    (tmp_path / "run" / "run.toml").write_text("format = 2\n[settings]\nruonds = 3\n")
    with pytest.raises(SettingError, match="rounds"):
        RunFolder(tmp_path / "run").settings()


def test_a_default_that_has_changed_since_does_not_change_a_run(tmp_path: Path) -> None:
    run_until(tmp_path / "cut", 2, "fedavg + agc(clip=0.5)")
    without_seals(tmp_path / "cut")
    written = tmp_path / "cut" / "run.toml"
    then = written.read_text().replace("eps=0.001", "eps=0.25")
    assert then != written.read_text()
    written.write_text(then)
    assert 'agc(clip=0.5, eps=0.25, exclude="nothing", linear="outputs")' in RunFolder(tmp_path / "cut").resumed_settings().method
    assert str(go_on(tmp_path / "cut").experiment.method) == "fedavg + agc(clip=0.5, eps=0.25)"


def test_what_is_no_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="it does not exist"):
        RunFolder(tmp_path / "nothing").document()
    with pytest.raises(RunFolderError, match=r"has no run\.toml"):
        RunFolder(tmp_path).document()


def test_copying_a_run_elsewhere_changes_nothing(tmp_path: Path) -> None:
    whole = train_run(experiment_of(), RunFolder(tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert go_on(tmp_path / "b").digest == whole.digest


def test_run_toml_says_what_leaves_a_client(tmp_path: Path) -> None:
    run("digits-mini(per_domain=16)", "elcfs", rounds=1, local_steps=1, out=tmp_path / "r")
    document = RunFolder(tmp_path / "r").document()
    assert document["method"]["data_derived_uploads"] and document["method"]["granularity"]
    assert {row["kind"] for row in document["plan"]} and all(row["travels"] for row in document["plan"])
