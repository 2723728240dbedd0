"""Runs killed with SIGKILL at seeded random instants end with the bits of a run never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("kill_harness.py")


@pytest.mark.parametrize(
    ("method", "points", "settings"),
    [
        ("fedavg", 7, []),
        ("fedbn", 7, []),
        ('fedprox(mu=0.1) + momentum(keep="global")', 7, ["momentum=0.9"]),
        ("fixbn(freeze_at=5)", 3, []),
        ("hfedf(warmup=3)", 3, []),
        ("pfedhn", 2, []),
        ("fedwon + agc(clip=0.64)", 2, []),
        ("fedstein", 2, []),
        ("gperxan", 2, []),
    ],
)
def test_killed_runs_end_with_equal_digests(method: str, points: int, settings: list[str]) -> None:
    command = [sys.executable, str(HARNESS), method, str(points), "1", *settings]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["digests"] == [told["whole"]] * points, told["kills"]
    assert all(told["metrics_equal"]), told["kills"]
