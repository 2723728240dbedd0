"""The grid over hFedF's options: chosen on source validation, a second seed for the best two, and nothing is tested before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.paths import BENCHMARKS
from helpers.scripts import loaded
from polyfed.core.method import parse

TINY = {"data": "digits-mini(per_domain=20)", "model": "small_cnn(width=4)", "unseen_part": "test", "batch_size": 40, "lr": 0.05}


def test_the_cells_are_those_of_the_issue() -> None:
    grid = loaded(BENCHMARKS / "hfedf_grid.py")
    assert len(grid.CELLS) == 6 and all(parse(text) for text in grid.CELLS.values())
    assert parse(grid.CELLS[grid.DEFAULT]).full_text == parse("hfedf").full_text
    frozen = parse(grid.CELLS["default heads, SGD 0.65, frozen trunk"]).full_text
    assert "trunk_rate=0.0" in frozen and "server_lr=0.65" in frozen and "sgd" in frozen


def test_cells_are_compared_over_the_turns_that_all_of_them_had() -> None:
    grid = loaded(BENCHMARKS / "hfedf_grid.py")
    scores = {
        "a": {(0, "photo"): 0.5, (0, "sketch"): 0.7, (1, "photo"): 0.99},
        "b": {(0, "photo"): 0.6, (0, "sketch"): 0.65},
        "c": {(0, "photo"): 0.99, (0, "sketch"): None},
    }
    found = {cell: {turn: grid.Scored(value, [0.5, 0.25]) for turn, value in runs.items()} for cell, runs in scores.items()}
    assert list(grid.ranked(found).items()) == [("b", pytest.approx(0.625)), ("a", pytest.approx(0.6))]
    lines = grid.table(found).splitlines()
    assert lines[2].startswith("| b | 60.0 | 65.0 | 62.5 | 0.250 | 2 |") and lines[4].startswith("| c | 99.0 | diverged | diverged")


@pytest.mark.slow
def test_a_grid_chooses_then_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    grid = loaded(BENCHMARKS / "hfedf_grid.py")
    monkeypatch.setattr(grid, "SETTINGS", TINY)
    monkeypatch.setattr(
        grid, "CELLS", {name: text for name, text in grid.CELLS.items() if "epsilon" not in name and "SGD" not in name}
    )
    monkeypatch.setattr(grid, "BEST", 1)
    command = ["hfedf_grid.py", "none", "--out", str(tmp_path), "--rounds", "2", "--targets", "pen"]
    monkeypatch.setattr(sys, "argv", command)
    grid.main()
    said = capsys.readouterr().out
    assert "Chosen on source validation: " in said and not list(tmp_path.glob("*/final"))
    assert len((tmp_path / "grid.md").read_text().splitlines()) == 4
    runs = json.loads((tmp_path / "grid.json").read_text())
    assert [run["seed"] for run in runs].count(0) == 2 and [run["seed"] for run in runs].count(1) == 1
    assert all(len(run["spread"]) == 2 for run in runs), "the spread of each round"
    monkeypatch.setattr(sys, "argv", [*command, "--test"])
    grid.main()
    rows = json.loads((tmp_path / "tests.json").read_text())
    assert rows[-1]["method"] == "fedavg" and all("pen" in row["unseen"] for row in rows)
