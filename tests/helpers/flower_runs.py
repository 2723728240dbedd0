"""Runs over real Flower processes, and the runs in process they are compared with."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from helpers.flower_harness import Ended, HarnessError, Process, Trial
from polyfed.core.rounds import Request
from polyfed.flower.app import write_app
from polyfed.runs.experiment import Experiment
from polyfed.runs.lifecycle import train_run
from polyfed.runs.result import Result
from polyfed.settings import Settings

NODES = ("pen", "photo", "street")
METHODS_FILE = Path(__file__).with_name("flower_methods.py")
SMALL = Settings(
    data="digits-mini(per_domain=16)",
    unseen=("post", "print"),
    rounds=2,
    batch_size=8,
    local_steps=2,
    load=(str(METHODS_FILE),),
    checkpoint_every="1",
).trusted()
METHODS = (
    "fedavg",
    "fedbn",
    "fedprox(mu=0.1)",
    "silobn",
    "local",
    "fedavg + group_norm",
    "fedavg + layer_norm",
    "fedavg + instance_norm",
    "fedavg + no_norm",
    "fedavg + agc(clip=0.01)",
    "fedavgm",
    'fedavg + momentum(keep="local")',
    'fedavg + momentum(keep="global")',
    "fedwon",
    "fixbn",
    "fedstein",
    "gperxan",
    "hfedf",
    "fedtan",
    "elcfs",
    "fedwon + dp_sgd(epsilon=8.0)",
    "dp_fedavg(epsilon=8.0)",
)
"""Those of the core and the seed papers; several exchanges a round (fedtan), a setup (elcfs) and a hypernetwork (hfedf) among them."""
RUN_LIMIT = 1800.0
LISTED = hashlib.sha256(METHODS_FILE.read_bytes()).hexdigest()
"""What nodes must list to run the methods of these tests."""
EXECUTOR = ("python", "-m", "polyfed.flower.executor")
SUPERNODE = ("python", "-m", "polyfed.flower.supernode")


def settings_for(method: str, others: Settings = SMALL) -> Settings:
    """Small settings with a method."""
    return dataclasses.replace(others, method=method, momentum=0.9 if "momentum(" in method else 0.0)


@dataclass
class Site:
    """A trial with app folders made for it."""

    trial: Trial
    folder: Path
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def submit(self, settings: Settings, config: str = "", out: Path | None = None) -> Process:
        number = next(self.numbers)
        app = self.folder / f"app-{number}"
        write_app(app, settings, f"trial-{number}")
        out = out or self.folder / f"run-{number}"
        return self.trial.submit(app, "--run-config", f'min-nodes={len(NODES)} out="{out}" {config}'.strip())

    def run(self, settings: Settings, config: str = "", out: Path | None = None) -> Ended:
        return self.trial.ended(self.submit(settings, config, out), RUN_LIMIT)


def digest_in(log: str) -> str:
    """The digest a ServerApp told at its end."""
    found = re.search(r"digest ([0-9a-f]{64})", log)
    assert found is not None, log
    return found.group(1)


def waits_for(file: Path, run: Process, limit: float = 1200.0) -> None:
    """Wait until a node has made this file."""
    end = time.monotonic() + limit
    while not file.exists():
        if not run.alive or time.monotonic() > end:
            raise HarnessError(f"{file.name} was not made:\n{run.log[-3000:]}")
        time.sleep(0.05)


def in_process(settings: Settings, lost: Collection[tuple[int, str]] = ()) -> Result:
    """The run in this process; ``lost`` says in which rounds which clients do not answer."""
    experiment = Experiment(settings.trusted())
    experiment.backend.drops_out = lambda ask, client: _lost(ask, client, lost)  # type: ignore[method-assign]
    return train_run(experiment, None)


def _lost(request: Request, client: str, lost: Collection[tuple[int, str]]) -> bool:
    return request.what == "train" and (request.round, client) in lost
