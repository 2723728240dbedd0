"""A checkpoint seals the files around it: changed and missing files are reported, and reading changes nothing."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import SHORT, as_process, says
from helpers.recorded_runs import experiment_of, go_on, run_until
from helpers.watching import AfterRound
from polyfed.errors import RunFolderError
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.runs.reopen import read_snapshot
from polyfed.studies.report.html import report_on


def ways(folder: Path) -> list[Any]:
    return [lambda: go_on(folder), lambda: read_snapshot(folder, print), lambda: report_on(folder, folder.parent / "page.html")]


def refused(folder: Path, file: str) -> None:
    for way in ways(folder):
        with pytest.raises(RunFolderError, match=file.replace(".", r"\.")):
            way()


@pytest.mark.parametrize("finished", [True, False])
def test_a_changed_setting_is_named(tmp_path: Path, finished: bool) -> None:
    run_until(tmp_path / "r", 2) if not finished else train_run(experiment_of(), RunFolder(tmp_path / "r"))
    path = tmp_path / "r" / "run.toml"
    text = path.read_text()
    assert "lr = 0.05" in text
    path.write_text(text.replace("lr = 0.05", "lr = 0.15"))
    refused(tmp_path / "r", "run.toml")
    path.write_text(text)
    assert go_on(tmp_path / "r").digest == train_run(experiment_of(), None).digest


@pytest.mark.slow
def test_the_program_in_a_process_of_its_own_names_what_was_changed(images: Path, tmp_path: Path) -> None:
    assert as_process(tmp_path, "run", images, "--out", "run", "-q", *SHORT).code == 0
    commands = [("resume",), ("digest",), ("evaluate",), ("predict", next(images.rglob("*.png"))), ("report", "-o", "page.html")]
    for file, old, new in (("run.toml", "lr = 0.05", "lr = 0.15"), ("metrics.jsonl", '"loss": ', '"loss": 1')):
        path = tmp_path / "run" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        for name, *more in commands:
            says(as_process(tmp_path, name, "run", *more, *(["-q"] if name in ("resume", "evaluate", "predict") else [])), file)
        path.write_text(text)
    assert as_process(tmp_path, "digest", "run").code == 0


def test_an_empty_run_toml_is_named(tmp_path: Path) -> None:
    run_until(tmp_path / "r", 2)
    (tmp_path / "r" / "run.toml").write_text("")
    refused(tmp_path / "r", "run.toml")


@pytest.mark.parametrize("damage", ["edited", "half", "added"])
def test_changed_metrics_are_named(tmp_path: Path, damage: str) -> None:
    train_run(experiment_of(), RunFolder(tmp_path / "r"))
    path = tmp_path / "r" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    changed = {"edited": [lines[0].replace('"loss": ', '"loss": 1'), *lines[1:]], "half": lines[::2], "added": [*lines, lines[-1]]}
    path.write_text("".join(changed[damage]))
    before = path.read_bytes()
    refused(tmp_path / "r", "metrics.jsonl")
    assert path.read_bytes() == before


@pytest.mark.parametrize("added", ["the same again", "a better score", "no line at all"])
def test_lines_that_no_checkpoint_seals_are_not_reported(tmp_path: Path, added: str) -> None:
    run_until(tmp_path / "r", 2)
    page, path = tmp_path / "page.html", tmp_path / "r" / "metrics.jsonl"
    report_on(tmp_path / "r", page)
    before, content = page.read_text(), path.read_text()
    last = content.splitlines(keepends=True)[-1]
    path.write_text(
        content + {"the same again": content, "a better score": last.replace("0.", "0.9"), "no line at all": "{}\n"}[added]
    )
    report_on(tmp_path / "r", page)
    assert page.read_text() == before
    assert go_on(tmp_path / "r").digest == train_run(experiment_of(), None).digest


def test_scores_of_a_run_without_a_readable_checkpoint_are_not_reported(tmp_path: Path) -> None:
    run_until(tmp_path / "r", 2)
    for file in (tmp_path / "r" / "checkpoint").glob("*.safetensors"):
        file.write_bytes(b"0" + file.read_bytes()[1:])
    path = tmp_path / "r" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"accuracy": 0.', '"accuracy": 0.987654'))
    with pytest.raises(RunFolderError, match="has no good checkpoint"):
        report_on(tmp_path / "r", tmp_path / "page.html")
    report_on(tmp_path / "r", tmp_path / "page.html", allow_unfinished=True)
    page = (tmp_path / "page.html").read_text()
    assert "No checkpoint is readable, so there are no scores" in page and "98.7" not in page and "987654" not in page


@pytest.mark.parametrize("damage", ["gone", "a file"])
def test_metrics_are_never_emptied_where_no_checkpoint_can_be_read(tmp_path: Path, damage: str) -> None:
    run_until(tmp_path / "r", 2)
    shutil.rmtree(tmp_path / "r" / "checkpoint")
    if damage == "a file":
        (tmp_path / "r" / "checkpoint").write_text("")
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"checkpoint.*Nothing was changed|Cannot read.*Nothing was changed"):
        go_on(tmp_path / "r")
    assert before and (tmp_path / "r" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("file", ["run.toml", "client", "metrics.jsonl"])
def test_a_file_deleted_in_mid_run_is_named_at_the_next_checkpoint(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = experiment_of(clients_per_round=1)

    def remove(server: Any) -> None:
        if server.round == 2:
            folder = tmp_path / "r"
            for path in folder.glob(f"checkpoint/{file}-*.safetensors") if file == "client" else [folder / file]:
                path.unlink()

    with caplog.at_level(logging.WARNING, "polyfed"):
        if file == "metrics.jsonl":
            with pytest.raises(RunFolderError, match=r"metrics\.jsonl was deleted"):
                train_run(experiment, RunFolder(tmp_path / "r"), callbacks=[AfterRound(remove)])
            return
        result = train_run(experiment, RunFolder(tmp_path / "r"), callbacks=[AfterRound(remove)])
    assert any(file in record.message and "deleted" in record.message for record in caplog.records)
    assert go_on(tmp_path / "r").digest == result.digest
