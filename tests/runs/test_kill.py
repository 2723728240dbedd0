"""Runs killed with SIGKILL at seeded random points go on from their last checkpoint, and end with the bits of a run never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from helpers.paths import HELPERS

HARNESS = HELPERS / "kill_harness.py"


@pytest.mark.parametrize(
    ("method", "points", "settings"),
    [
        ("fedavg", 7, []),
        ("fedbn", 7, []),
        ('fedprox(mu=0.1) + momentum(keep="global")', 7, ["momentum=0.9"]),
        ("fixbn(freeze_at=5)", 4, []),
        ("hfedf(warmup=3)", 4, []),
        ("pfedhn", 4, []),
        ("fedwon + agc(clip=0.64)", 4, []),
        ("fedstein", 4, []),
        ("gperxan", 4, []),
    ],
)
def test_killed_runs_go_on_and_end_with_equal_digests(method: str, points: int, settings: list[str]) -> None:
    command = [sys.executable, str(HARNESS), method, str(points), "1", *settings]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    kills = told["kills"]
    assert len(kills) == points and all(kill["digest"] == told["whole"] and kill["metrics_equal"] for kill in kills), kills
    # A run may be over before the clock strikes, but it cannot pass by a file.
    at_files = [kill for kill in kills if kill["kind"] == "file"]
    assert all(kill["killed"] and kill["went_on_from"] == kill["last_round"] for kill in at_files), kills
    assert any(kill["killed"] and 0 < kill["went_on_from"] < told["rounds"] for kill in kills), kills
