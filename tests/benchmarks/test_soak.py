"""A short soak run: killed, resumed with the same command, and without growth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.paths import BENCHMARKS

SHORT = ("--rounds", "80", "--clients", "40", "--a-round", "10", "--workers", "2", "--checkpoint-every", "1s", "--look-every", "2")
PATIENCE = 600


def lines_of(run: Path) -> list[int]:
    """Return the measured rounds."""
    file = run.with_name(f"{run.name}.soak.jsonl")
    return [json.loads(line)["round"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_a_soak_that_was_killed_goes_on_and_stays_flat(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, str(BENCHMARKS / "soak.py"), str(run), *SHORT]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while len(lines_of(run)) < 10 and time.monotonic() - began < PATIENCE:
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    before = lines_of(run)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are flat" in done.stdout
    went_on = lines_of(run)[len(before) :]
    assert went_on[0] > 2, "it began again"
    assert went_on[-1] == 80
