"""The commands of a report make its runs again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import polyfed as library
from helpers.command_line import Command
from polyfed.studies.report.commands import compare_command, pieces, report_command
from polyfed.studies.report.gather import gather
from polyfed.studies.report.html import render
from polyfed.studies.report.run_record import RunRecord

DATA, MODEL = "digits-mini(per_domain=10)", "small_cnn(width=4)"
METHODS = ["fedavg", "fedprox(mu=0.1) with lr=0.02"]


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one at its own rate, with every domain left out in turn."""
    folder = tmp_path_factory.mktemp("turns") / "runs"
    found = library.compare(DATA, METHODS, MODEL, protocol="leave-one-out", rounds=1, seed=3, out=folder, local_steps=1)
    assert not found.problems
    return folder


def parts_of(folder: Path, but: str = "nothing") -> tuple[list[RunRecord], list[str]]:
    (group,) = gather(sorted(path.parent for path in folder.glob("*/run.toml") if but not in path.parent.name))
    return [part for row in group.rows for run in row.records for part in run.folders], list(group.left_out)


def test_one_command_makes_all_runs_of_a_comparison(turns: Path, polyfed: Command) -> None:
    command = compare_command(*parts_of(turns))
    assert command is not None and "--protocol leave-one-out" in command and "--unseen" not in command
    assert "fedprox(mu=0.1) with lr=0.02" in command and "--seed 3" in command
    ended = polyfed(*shlex.split(command)[1:], "--out", turns)
    assert ended.code == 0 and f"Reusing 10 of 10 runs from {turns}." in ended.err
    page = render(sorted(path.parent for path in turns.glob("*/run.toml")))
    assert "Separate commands for the 10 runs" in page and page.count("<span>compare</span>") == 1


def test_runs_that_no_comparison_makes_have_no_common_command(turns: Path) -> None:
    assert compare_command(*parts_of(turns, but="lr-0.02-seed3-without-pen")) is None  # one run is missing
    assert compare_command(*parts_of(turns, but="pen")) is None  # a domain that nobody left out
    assert compare_command(*parts_of(turns, but="fedprox")) is None  # one method is no comparison


def test_an_option_stays_with_its_value() -> None:
    text = "polyfed run 'pacs(size=16)' --method 'fedavg + agc' --unseen 'a b' --unseen-part all --device cpu"
    assert pieces(text)[2:] == ["'pacs(size=16)'", "--method 'fedavg + agc'", "--unseen 'a b'", "--unseen-part all", "--device cpu"]
    assert " ".join(pieces(text)) == text and pieces("# started in Python") == ["# started in Python"]


def test_a_folder_of_runs_stands_for_all_of_them(turns: Path, tmp_path: Path) -> None:
    runs = sorted(path.parent for path in turns.glob("*/run.toml"))
    assert report_command(runs, "page.html") == f"polyfed report {turns} -o page.html"
    assert report_command(runs[:2], "page.html") == f"polyfed report {runs[0]} {runs[1]} -o page.html"
    assert report_command([tmp_path / "other", *runs], "p.html") == f"polyfed report {turns} {tmp_path / 'other'} -o p.html"
