"""Run folders of format 1 are rejected with an error that names the version that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import polyfed as package
from helpers.command_line import Command, says
from helpers.watching import AfterRound
from polyfed.runs.callbacks.callback import RunState
from polyfed.runs.folder.manifest import sealed
from polyfed.runs.folder.run_folder import RunFolder

DATA = "digits-mini(per_domain=20)"
SENTENCE = "was written by polyfed 0.1 (format 1), which this version does not read. Open it with polyfed 0.2."


def document_of_format_1(folder: Path) -> str:
    """A run that stopped before its first checkpoint."""
    for path in (folder / "checkpoint").iterdir():
        path.unlink()
    file = folder / "run.toml"
    file.write_text(file.read_text().replace("format = 2", "format = 1", 1))
    return file.name


def checkpoint_of_format_1(folder: Path) -> str:
    file = max((folder / "checkpoint").glob("manifest-*.json"))
    manifest = json.loads(file.read_text())
    del manifest["seal"]
    file.write_text(json.dumps(sealed({**manifest, "format": 1})))
    return file.name


@pytest.mark.parametrize("make", [document_of_format_1, checkpoint_of_format_1])
def test_the_first_format_is_refused_with_one_sentence(tmp_path: Path, polyfed: Command, make: Callable[[Path], str]) -> None:
    package.run("digits-mini(per_domain=10)", "fedavg", "small_cnn(width=4)", rounds=1, out=tmp_path / "run")
    file = make(tmp_path / "run")
    for words in (("resume", "run"), ("evaluate", "run"), ("report", "run"), ("digest", "run")):
        says(polyfed(*words), f"{file} {SENTENCE}")


def stopped(run: RunState) -> None:
    if run.round == 1:
        raise KeyboardInterrupt


def without_decay(folder: Path) -> None:
    """Change the run folder of ``fixbn(decay=None)`` to one from before the option existed."""
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

    settings = package.Settings(data=DATA, method="fixbn(decay=None) + fedprox(mu=0.01)", rounds=3, checkpoint_every="1")
    whole = package.run(DATA, settings.method, rounds=3)
    assert whole.digest != package.run(DATA, "fixbn + fedprox(mu=0.01)", rounds=3).digest
    with pytest.raises(KeyboardInterrupt):
        train_run(Experiment(settings), RunFolder(tmp_path / "run"), callbacks=[AfterRound(stopped)])
    without_decay(tmp_path / "run")
    resumed = package.resume(tmp_path / "run")
    assert resumed.digest == whole.digest
    assert "decay=None" in str(resumed.experiment.method) and "decay=None" in RunFolder(tmp_path / "run").settings().method
    assert "decay=None" in package.report(tmp_path / "run", tmp_path / "report.html").read_text()


def test_compare_does_not_reuse_a_fixbn_run_that_lacks_the_decay(tmp_path: Path) -> None:
    package.compare(DATA, ["fixbn"], rounds=2, out=tmp_path / "new")
    (new,) = (path.parent for path in tmp_path.glob("new/*/run.toml"))
    old = package.run(DATA, "fixbn(decay=None)", rounds=2, out=tmp_path / "old" / new.name)
    without_decay(tmp_path / "old" / new.name)
    package.compare(DATA, ["fixbn"], rounds=2, out=tmp_path / "old")
    found = {path.parent.name: package.open_run(path.parent).digest for path in tmp_path.glob("old/*/run.toml")}
    assert found == {new.name: old.digest, f"{new.name}-2": package.open_run(new).digest}
