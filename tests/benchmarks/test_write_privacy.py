"""The tables of docs/results/privacy.md come from run folders; what was not run is listed as such."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.paths import ROOT
from helpers.scripts import loaded


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return loaded(ROOT / "benchmarks" / "write_privacy.py")


def made(folder: Path, method: str, rows: list[dict[str, Any]], seconds: float, ended: bool = True) -> None:
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "run.toml").write_text(f"[settings]\nmethod = '{method}'\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        notes = {"notes": {"costs": {"cpu_seconds": {"training": seconds}}}}
        (folder / "checkpoint" / "manifest-000002_final.json").write_text(json.dumps(notes))


@pytest.fixture
def page(tmp_path: Path, writer: ModuleType) -> list[str]:
    out = tmp_path / "out"
    seen = [{"round": 2, "view": "seen", "accuracy": score, "balanced_accuracy": score / 2} for score in (0.5, 0.7)]
    spent = [{"round": number, "view": "privacy", "client": "a", "privacy.epsilon_spent": 1.5 * number} for number in (1, 2)]
    made(out / "digits-five" / "plain", "agc(clip=1.28) + fedwon", seen, 10)
    made(out / "digits-five" / "noisy", "fedavg + dp_sgd(epsilon=3.0) + group_norm(groups=32)", [*spent, *seen], 40)
    made(out / "digits-five" / "stopped", "fedwon", [], 0, ended=False)
    leaked = {"all": {"loss": {"auc": 0.5171, "tpr_at_1_percent_fpr": 0.009}}}
    (out / "leakage" / "digits-five").mkdir(parents=True)
    (out / "leakage" / "digits-five" / "noisy.json").write_text(json.dumps(leaked))
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- from run folders: digits-five -->\nold\n<!-- end -->\nafter\n")
    writer.main([str(out), str(path)])
    return path.read_text().splitlines()


def test_rows_are_what_the_folders_say(page: list[str]) -> None:
    assert "| fedwon + agc | infinite |  | 60.0 | 30.0 | not measured | not measured | 10 |" in page
    assert "| fedavg + group_norm + dp_sgd | 3 | 3.000 | 60.0 | 30.0 | 0.517 | 0.9 | 40 |" in page
    assert (page[0], page[-1], "old" in page) == ("before", "after", False)


def test_what_was_not_run_or_not_ended_is_listed_with_what_it_would_take(page: list[str]) -> None:
    assert "| fedwon | infinite |  | not run |  |  |  | about 10 |" in page
    assert "| fedwon + dp_sgd | 1 |  | not run |  |  |  | about 40 |" in page
    assert len([line for line in page if line.startswith("| fed")]) == 12


def test_the_page_has_a_table_for_every_data_set(writer: ModuleType) -> None:
    assert {found["name"] for found in writer.BLOCK.finditer(writer.PAGE.read_text())} == set(writer.SETS)
