"""Run folders of the first format are refused with one sentence that names the version that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import polyfed as package
from helpers.command_line import Command, says
from polyfed.runs.manifest import sealed

SENTENCE = "was written by polyfed 0.1 (format 1), which this version does not read. Open it with polyfed 0.2."


def document_of_format_1(folder: Path) -> str:
    """A run that was stopped before its first checkpoint."""
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
