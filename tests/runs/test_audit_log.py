"""The audit log: changed, added and removed lines are detected, and several processes can write."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from helpers.command_line import Command
from polyfed.errors import DataError
from polyfed.runs.folder.audit_log import AuditLog, lines_of, verify


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    for number in range(5):
        AuditLog(path).write("asked", round=number, node="pen\nforged")
    return path


def test_a_whole_chain_is_verified_and_private(file: Path) -> None:
    assert verify(file).lines == 5
    assert file.stat().st_mode & 0o777 == 0o600
    assert [line["round"] for line in lines_of(file)] == list(range(5))


@pytest.mark.parametrize("line", range(5))
def test_a_changed_line_is_named(file: Path, line: int) -> None:
    lines = file.read_text().splitlines()
    lines[line] = lines[line].replace('"event": "asked"', '"event": "never"')
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=f"line {line + 1} was changed"):
        verify(file)


@pytest.mark.parametrize("line", range(4))
def test_a_line_taken_out_is_named(file: Path, line: int) -> None:
    lines = file.read_text().splitlines()
    del lines[line]
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=f"line {line + 1} does not follow"):
        verify(file)


def test_lines_taken_from_the_end_are_found_by_a_hash_that_was_noted(file: Path) -> None:
    noted = verify(file).last
    AuditLog(file).write("asked")
    assert verify(file, noted).lines == 6
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    assert verify(file).lines == 4
    with pytest.raises(DataError, match="the chain of 4 lines does not contain"):
        verify(file, noted)


def test_a_line_that_a_power_cut_left_unfinished_is_removed_and_said(file: Path) -> None:
    with file.open("a") as torn:
        torn.write('{"time": "2026')
    AuditLog(file).write("asked")
    assert verify(file).lines == 6
    assert list(lines_of(file))[-1]["torn_bytes_removed"] == 14


def write_some(path: Path) -> None:
    for number in range(20):
        AuditLog(path).write("asked", number=number)


def test_several_processes_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_some, args=(path,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert verify(path).lines == 60


def test_the_command_says_what_it_found(file: Path, polyfed: Command) -> None:
    done = polyfed("audit", "verify", file)
    assert done.code == 0 and "chain of 5 lines is intact" in done.out
    file.write_text(file.read_text().replace("asked", "never", 1))
    done = polyfed("audit", "verify", file)
    assert done.code == 2 and "line 1 was changed" in done.err
    file.write_text(json.dumps([1]) + "\n")
    assert polyfed("audit", "verify", file).code == 2
