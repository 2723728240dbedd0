"""Tables of sweeps on pages: numbers worked out by hand, failed seeds last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.paths import BENCHMARKS
from helpers.scripts import loaded

DOCUMENT = {
    "final_seeds": [0, 1],
    "made_with": {"commit": "9999999999"},
    "methods": [
        {
            "method": "fixbn",
            "chosen": {"values": {"lr": 0.1}, "validation": 0.9},
            "tests": [{"seed": 0, "digest": "a" * 64, "run": "first", "accuracy": {"mean": 0.99, "worst": 0.9}}],
            "problem": "The loss became nan. Lower --lr.",
        },
        {"method": "fedavg", "chosen": None, "tests": [], "problem": "every trial failed"},
        {
            "method": "fedbn",
            "chosen": {"values": {"lr": 0.3}, "validation": 0.5},
            "tests": [
                {
                    "seed": 0,
                    "digest": "b" * 64,
                    "run": "first",
                    "accuracy": {"mean": 0.10, "worst": 0.1},
                    "headline": {"mean": 0.80, "worst": 0.7},
                },
                {"seed": 1, "digest": "c" * 64, "run": "second", "accuracy": {"mean": 0.82, "worst": 0.7}},
            ],
            "problem": None,
        },
    ],
}


def test_the_table_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run, commit in (("first", "abcdef0123"), ("second", "1234567890")):
        Path(run).mkdir()
        Path(run, "run.toml").write_text(f'[made_with]\ncommit = "{commit}"\n')
    (tmp_path / "out" / "one").mkdir(parents=True)
    (tmp_path / "out" / "one" / "sweep.json").write_text(json.dumps(DOCUMENT))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- sweep: one -->\nold\n<!-- end -->\nafter\n<!-- sweep: gone -->\nkept\n<!-- end -->\n")

    loaded(BENCHMARKS / "write_sweeps.py").write(page, tmp_path / "out")

    before, _, head, _, first, second, third, _, commits, end, after, *left = page.read_text().splitlines()
    assert (before, end, after) == ("before", "<!-- end -->", "after")
    assert left == ["<!-- sweep: gone -->", "kept", "<!-- end -->"]
    assert head.startswith("| method | chosen |")
    assert first == "| `fedbn` | lr 0.3 | 50.0 | 81.0 ± 1.4 | 70.0 ± 0.0 | 0: `bbbbbbbbbbbb`, 1: `cccccccccccc` |"
    assert second == "| `fixbn` | lr 0.1 | 90.0 | 99.0 | 90.0 | 0: `aaaaaaaaaaaa`; 1 of 2 seeds: The loss became nan |"
    assert third == "| `fedavg` | – | – | – | – | every trial failed |"
    assert commits == "Commit `1234567`, `abcdef0`."
