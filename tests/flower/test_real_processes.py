"""Real Flower processes on loopback, with TLS and node keys: the same weights as in process, and a node killed in mid-round.

One SuperLink and three SuperNodes for all. ``tests/flower/test_real_processes_all.py`` has the other methods and faults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers.flower_harness import Trial
from helpers.flower_runs import (
    EXECUTOR,
    LISTED,
    METHODS_FILE,
    NODES,
    SUPERNODE,
    Site,
    digest_in,
    in_process,
    settings_for,
    waits_for,
)

pytestmark = pytest.mark.flower


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("flower")
    configs = [f'domain="{name}" state="{folder / "state" / name}" code="{LISTED}"' for name in NODES]
    with Trial(folder, configs, executor=EXECUTOR, supernode=SUPERNODE) as trial:
        yield Site(trial, folder)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "talkative"])
def test_over_real_processes_all_weights_are_those_of_the_run_in_process(site: Site, method: str) -> None:
    settings = settings_for(method)
    ended = site.run(settings)
    assert ended.status == "finished:completed", ended.log
    assert digest_in(ended.log) == in_process(settings).digest


def test_a_node_killed_in_mid_round_is_left_out_by_name_and_the_run_goes_on(site: Site) -> None:
    victim, busy = NODES[1], site.folder / "busy"
    settings = settings_for(f'fedbn + napping(client="{victim}", file="{busy}")')
    run = site.submit(settings, "patience=0.0")
    waits_for(busy, run)
    site.trial.kill_node(2)
    ended = site.trial.ended(run)
    assert ended.status == "finished:completed", ended.log
    assert f"Round 2: client {victim} is dropped" in ended.log
    plain = dataclasses.replace(settings, method="fedbn", load=(str(METHODS_FILE),))
    assert digest_in(ended.log) == in_process(plain, lost={(2, victim)}).digest
