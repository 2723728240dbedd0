"""Local training: every client by itself."""

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
