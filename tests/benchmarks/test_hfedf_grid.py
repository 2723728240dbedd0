"""The grid over hFedF's options: chosen on source validation over the turns that all cells had, and nothing is tested before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.paths import BENCHMARKS
from helpers.scripts import loaded
from polyfed.studies.sweep.space import Axis

TINY = {"data": "digits-mini(per_domain=40)", "model": "small_cnn", "unseen_part": "test", "batch_size": 40, "lr": 0.05}


def test_cells_are_compared_over_the_turns_that_all_of_them_had() -> None:
    grid = loaded(BENCHMARKS / "hfedf_grid.py")
    found = {"a": {(0, "photo"): 0.5, (0, "sketch"): 0.7, (1, "photo"): 0.99}, "b": {(0, "photo"): 0.6, (0, "sketch"): 0.65}}
    assert list(grid.mean_validation(found).items()) == [("b", pytest.approx(0.625)), ("a", pytest.approx(0.6))]


def test_a_grid_chooses_then_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    grid = loaded(BENCHMARKS / "hfedf_grid.py")
    monkeypatch.setattr(grid, "SETTINGS", TINY)
    monkeypatch.setattr(
        grid,
        "GRID",
        (Axis("hfedf.head_init", ("default", "initial")), Axis("hfedf.server_eps", (1e-8,)), Axis("hfedf.trunk_rate", (1.0,))),
    )
    command = ["hfedf_grid.py", "none", "--out", str(tmp_path), "--rounds", "2", "--seeds", "1", "--targets", "pen"]
    monkeypatch.setattr(sys, "argv", command)
    grid.main()
    said = capsys.readouterr().out
    assert "Chosen on source validation: hfedf.head_init=" in said and not list(tmp_path.glob("*/final"))
    assert len((tmp_path / "grid.md").read_text().splitlines()) == 4
    monkeypatch.setattr(sys, "argv", [*command, "--test"])
    grid.main()
    rows = json.loads((tmp_path / "tests.json").read_text())
    assert rows[-1]["method"] == "fedavg" and all("pen" in row["unseen"] for row in rows)
