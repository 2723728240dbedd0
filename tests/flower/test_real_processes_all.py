"""Real Flower processes on loopback: the methods and faults that ``tests/flower/test_real_processes.py`` leaves out. Takes about half an hour."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers.flower_harness import LINK, Trial
from helpers.flower_runs import EXECUTOR, LISTED, METHODS, NODES, Site, digest_in, in_process, settings_for, waits_for
from helpers.paths import TESTS

pytestmark = [pytest.mark.flower, pytest.mark.slow]

IN_THE_SHORT_TESTS = ("fedavg", "fedbn")
FAULTS = {
    "nan": "not finite",
    "shape": "has the shape",
    "extra": "was not requested",
    "huge": "bytes, but at most",
    "failure": "disk on fire",
}
LONG = 3600.0
WARM, FLOWERS_OWN = "executor", "superexec"
"""What runs ClientApps: our warm executor, or Flower's own, which is slow. Where it makes no difference, the warm one does."""
with_the_warm_executor = pytest.mark.parametrize("site", [WARM], indirect=True)
with_both = pytest.mark.parametrize("site", [WARM, FLOWERS_OWN], indirect=True)


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three nodes with a domain each."""
    folder = tmp_path_factory.mktemp("flower")
    configs = [f'domain="{name}" state="{folder / "state" / name}" code="{LISTED}"' for name in NODES]
    with Trial(folder, configs, executor=EXECUTOR if request.param == WARM else ()) as trial:
        yield Site(trial, folder)


def same_weights(site: Site, method: str) -> None:
    settings = settings_for(method)
    ended = site.trial.ended(site.submit(settings), LONG)
    assert ended.status == "finished:completed", ended.log
    assert digest_in(ended.log) == in_process(settings).digest


@with_the_warm_executor
@pytest.mark.parametrize("method", [method for method in METHODS if method not in IN_THE_SHORT_TESTS])
def test_over_real_processes_all_weights_are_those_of_the_run_in_process(site: Site, method: str) -> None:
    same_weights(site, method)


@pytest.mark.parametrize("site", [FLOWERS_OWN], indirect=True)
def test_with_flowers_own_executor_all_weights_are_those_of_the_run_in_process(site: Site) -> None:
    same_weights(site, "silobn")


@with_the_warm_executor
@pytest.mark.parametrize("what", FAULTS)
def test_a_node_that_sends_what_it_should_not_is_left_out_by_name(site: Site, what: str) -> None:
    settings = settings_for(f'fedbn + faulty(client="{NODES[0]}", what="{what}")')
    ended = site.run(settings)
    assert ended.status == "finished:completed", ended.log
    assert re.search(rf"Round 2: .*{NODES[0]} is dropped: .*{FAULTS[what]}", ended.log), ended.log
    assert digest_in(ended.log) == in_process(settings_for("fedbn"), lost={(2, NODES[0])}).digest


@with_the_warm_executor
def test_a_node_that_never_answers_is_left_out_by_name(site: Site) -> None:
    busy = site.folder / "asleep"
    settings = settings_for(f'fedbn + napping(client="{NODES[0]}", file="{busy}", seconds=70.0)')
    ended = site.run(settings, "timeout=60.0")
    assert ended.status == "finished:completed", ended.log
    assert f"Round 2: client {NODES[0]} is dropped: it did not reply within 60 seconds" in ended.log
    assert digest_in(ended.log) == in_process(settings_for("fedbn"), lost={(2, NODES[0])}).digest


@with_both
def test_a_server_stopped_in_mid_round_and_started_again_ends_with_the_same_digest(site: Site) -> None:
    out, busy = site.folder / "stopped", site.folder / "stop-now"
    settings = settings_for(f'fedbn + napping(client="{NODES[2]}", file="{busy}", seconds=20.0)')
    run = site.submit(settings, out=out)
    waits_for(busy, run)
    number = re.search(r"Successfully started run (\d+)", run.log)
    assert number is not None
    site.trial.flwr("stop", number.group(1), LINK)
    assert site.trial.ended(run).status == "finished:stopped"
    ended = site.run(settings, out=out)
    assert ended.status == "finished:completed", ended.log
    assert "Resuming the run in" in ended.log
    assert digest_in(ended.log) == in_process(settings_for("fedbn")).digest


@with_both
def test_a_node_killed_in_mid_round_and_started_again_ends_with_the_same_digest(site: Site) -> None:
    busy = site.folder / "kill-now"
    method = f'fedbn + napping(client="{NODES[1]}", file="{busy}")'
    settings = dataclasses.replace(settings_for(method), min_share=1.0)
    run = site.submit(settings, "patience=240.0")
    waits_for(busy, run)
    site.trial.kill_node(2)
    site.trial.restart_node(2, limit=900.0)
    ended = site.trial.ended(run, LONG)
    assert ended.status == "finished:completed", ended.log
    assert "Retrying the round." in ended.log
    assert digest_in(ended.log) == in_process(settings_for("fedbn")).digest


def test_flowers_simulation_gives_the_same_weights_and_its_run_can_be_resumed_and_looked_at(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the flower extra: pip install 'polyfed[flower]'")
    command = [sys.executable, "-m", "helpers.flower_simulated", tmp_path]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LONG, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all as in process" in done.stdout
