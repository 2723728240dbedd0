"""The model that all clients of a process share."""

from __future__ import annotations

import functools

import torch

from helpers import tiny_runs
from polyfed.core.client import Client
from polyfed.core.workbench import ClientState, Workbench
from polyfed.testing import tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_the_workbench_never_trains_on_what_the_last_client_left() -> None:
    experiment = trained("fedbn", rounds=1)
    bench: Workbench = experiment.bench
    client = Client(tiny_federation().clients[2], bench, experiment.backend.client_states["small"], 2)
    client.receive(experiment.server.outgoing("small"))
    assert torch.equal(bench.live["stem.1.running_mean"], experiment.backend.client_states["small"].entries["stem.1.running_mean"])
    newcomer = Client(tiny_federation().clients[2], bench, ClientState(), 2)
    newcomer.receive(experiment.server.outgoing("small"))
    assert torch.equal(bench.live["stem.1.running_mean"], torch.zeros(8))
