"""Clients with random images, and how far two runs on them are apart."""

from __future__ import annotations

from typing import Any

import torch

from polyfed.core.data_types import ArrayExamples, ClientData, Federation, Preparation
from polyfed.runs.experiment import Experiment


def federation(counts: tuple[int, ...] = (11, 11, 11, 8, 8), size: int = 16, **preparation: Any) -> Federation:
    """Clients with random images, each of its own brightness."""
    stream = torch.Generator().manual_seed(7)
    clients = []
    for place, count in enumerate(counts):
        x = torch.randint(0, 200 + 10 * place, (count, 3, size, size), dtype=torch.uint8, generator=stream)
        y = torch.randint(0, 4, (count,), generator=stream)
        held = ArrayExamples(x[:3], y[:3])
        clients.append(ClientData(f"c{place}", (f"d{place}",), ArrayExamples(x, y), {f"d{place}": held}, validation=held))
    return Federation("random", tuple("0123"), tuple(clients), preparation=Preparation(**preparation))


def largest_difference(a: Experiment, b: Experiment) -> float:
    """The largest relative difference in the server's state and in what clients keep."""
    pairs = [(a.server.state[name], value) for name, value in b.server.state.items()]
    assert a.backend.client_states.keys() == b.backend.client_states.keys()
    for client, kept in b.backend.client_states.items():
        assert a.backend.client_states[client].entries.keys() == kept.entries.keys()
        pairs += [(a.backend.client_states[client].entries[name], value) for name, value in kept.entries.items()]
    return max(float((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-12)) for x, y in pairs)
