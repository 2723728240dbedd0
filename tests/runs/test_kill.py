"""Runs killed with SIGKILL at seeded random points resume from their last checkpoint, with bit-identical results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from helpers.method_texts import as_trained
from helpers.paths import DOCS, HELPERS
from helpers.tiny_runs import trained
from polyfed.core.method import methods

HARNESS = HELPERS / "kill_harness.py"
POINTS = 5
OWN_SETTINGS = {'fedprox(mu=0.1) + momentum(keep="global")': ["momentum=0.9"]}
STATEFUL = (
    "ccst",
    "copa",
    "dp_fedavg",
    "dp_sgd",
    "elcfs",
    "fedadagrad",
    "fedadam",
    "fedavgm",
    "fedbn",
    "feddg_ga",
    "fednova",
    "fedsr",
    "fedstein",
    "fedtan",
    "fedyogi",
    "gperxan",
    "hfedf",
    "local",
    "partialfed_adaptive",
    "partialfed_fix",
    "perxan",
    "pfedhn",
    "scaffold",
    "silobn",
    "topk",
)
"""Methods with state at clients or at the server."""
VARIANTS = ("fedavg", "fixbn(freeze_at=5)", "hfedf(warmup=3)", "fedwon + agc(clip=0.64)", *OWN_SETTINGS)


def killed(method: str, points: int, seed: int, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Kill runs of a method at several points; return where each resumed, and its result."""
    command = [sys.executable, str(HARNESS), method, str(points), str(seed), *OWN_SETTINGS.get(method, []), *more]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], points: int) -> None:
    kills = found["kills"]
    assert len(kills) == points and all(kill["digest"] == found["whole"] and kill["metrics_equal"] for kill in kills), kills
    # A run may end before a time limit, but it cannot skip a file.
    at_files = [kill for kill in kills if kill["kind"] == "file"]
    assert all(kill["killed"] and kill["went_on_from"] == kill["last_round"] for kill in at_files), kills
    assert any(kill["killed"] and 0 < kill["went_on_from"] < found["rounds"] for kill in kills), kills


@pytest.mark.parametrize(
    "method",
    [
        "fedbn",
        *(pytest.param(text, marks=pytest.mark.slow) for text in ('fedprox(mu=0.1) + momentum(keep="global")', "hfedf(warmup=3)")),
    ],
)
def test_killed_runs_go_on_and_end_with_equal_digests(method: str) -> None:
    check(killed(method, 4, seed=1), 4)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*STATEFUL, *VARIANTS])
def test_every_stateful_method_survives_kills(method: str) -> None:
    """Five points for each stateful method, and for some combinations."""
    check(killed(as_trained(method), POINTS, seed=2), POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hfedf(warmup=3)", "scaffold"])
def test_runs_go_on_after_the_disk_was_full(method: str) -> None:
    """16 full disks, from a random file of a random checkpoint until the run is resumed."""
    found = killed(method, 4, seed=3, more=('kinds=["disk"]',))
    kills = found["kills"]
    assert len(kills) == 4 and all(kill["killed"] for kill in kills), kills
    assert all(kill["digest"] == found["whole"] and kill["metrics_equal"] for kill in kills), kills
    assert all(kill["went_on_from"] == kill["last_round"] for kill in kills), kills


def test_the_page_says_how_many_runs_are_killed() -> None:
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    kills = f"{len(STATEFUL) * POINTS} over {len(STATEFUL)} stateful methods, {len(VARIANTS) * POINTS} over combinations"
    assert f"| {kills} |" in page


@pytest.mark.slow
def test_no_stateful_method_is_left_out() -> None:
    """Train each method for two rounds, and inspect its state."""
    found = []
    for name in sorted(methods.names()):
        experiment = trained(as_trained(name))
        if experiment.backend.client_states or experiment.server.memory_state():
            found.append(name)
    assert tuple(found) == STATEFUL
    assert len(found) * POINTS >= 100
