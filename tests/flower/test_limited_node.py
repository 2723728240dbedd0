"""A node on a SuperLink of one's own that limits what it spends over all runs, with real processes: what its account cannot count is declined."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")
pytest.importorskip("opacus", reason="needs the privacy extra: pip install 'polyfed[privacy]'")

from helpers.deployed import DATA, DOMAINS
from helpers.flower_harness import Trial
from helpers.flower_runs import EXECUTOR, SMALL, SUPERNODE
from helpers.hostile_app import SERVER_APP
from helpers.hostile_server import called, honest_ask, listening
from polyfed.flower.app import write_app

pytestmark = [pytest.mark.flower, pytest.mark.slow]

AT_CLIENTS = 'dp_fedavg(noise="system", noise_at="client", adaptive=False, clip=0.001)'
UNCOUNTED = {
    "fedavg": "no noise that is secret from the server",
    'dp_fedavg(noise="system")': "no noise that is secret from the server",
    'scaffold + dp_fedavg(noise="system", noise_at="client")': "which no noise covers",
}
LIMITED, FREE = 1, 2


def test_what_an_account_cannot_count_is_declined_by_the_node_that_limits_it(tmp_path: Path) -> None:
    configs = [f'data="{DATA}" domain="{DOMAINS[0]}" state="{tmp_path / name}"' for name in ("limited", "free")]
    configs[0] += " max-total-epsilon=20.0"
    with listening() as (listener, variables), Trial(tmp_path, configs, variables, EXECUTOR, SUPERNODE) as trial:
        numbers = {name: int(re.findall(r"SuperNode ID: (\d+)", trial.node(name).log)[-1]) for name in (LIMITED, FREE)}
        for number, (method, why) in enumerate({**UNCOUNTED, AT_CLIENTS: ""}.items()):
            settings = dataclasses.replace(SMALL, load=(), method=method)
            asks = [honest_ask(settings, tmp_path / f"fakes-{number}", what) for what in ("train", "evaluate")]
            write_app(tmp_path / f"app-{number}", settings, f"limited-{number}", SERVER_APP)
            submitted = trial.submit(tmp_path / f"app-{number}")
            with called(listener) as run:
                run.numbers = {str(name): node for name, node in numbers.items()}
                for asked in asks if why else asks[:1]:
                    found = run.ask(str(LIMITED), asked).control
                    assert found["ok"] == (not why), found
                    if why:
                        assert found["kind"] == "declined" and why in found["problem"]
                        assert "its privacy ledger limits epsilon over all runs (max-total-epsilon)" in found["problem"]
                    assert run.ask(str(FREE), asked).control["ok"]
            assert trial.ended(submitted).status == "finished:completed"
