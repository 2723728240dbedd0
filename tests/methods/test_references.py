"""Local and central training: every client by itself, and one client with all data."""

from __future__ import annotations

import functools

import torch

from helpers import tiny_runs
from polyfed.testing import tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_local_is_each_clients_own_uninterrupted_training() -> None:
    federation = tiny_federation()
    together = trained("local", federation, momentum=0.9)
    alone = tiny_federation({"big": 13})
    single = trained("central", alone.__class__(alone.name, alone.classes, alone.clients), momentum=0.9)
    stream_named_big = trained("fedavg + momentum(keep='local')", tiny_federation({"big": 13}), momentum=0.9)
    for name, value in stream_named_big.server.state.items():
        assert torch.equal(together.backend.client_states["big"].entries[name], value), name
    assert single.federation.clients[0].id == "pooled"


def test_central_trains_on_the_union_and_tests_every_domain() -> None:
    experiment = trained("central")
    assert [len(client.train) for client in experiment.federation.clients] == [13 + 8 + 5]
    rows = [row for row in experiment.evaluate() if row.view == "seen"]
    assert {row.domain for row in rows} == {"big", "middle", "small"}
