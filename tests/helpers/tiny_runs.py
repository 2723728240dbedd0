"""Experiments on the tiny federation: built, trained, their digests, and their clients and batches.

A file whose tests want other settings says so once: ``trained = functools.partial(tiny_runs.trained, rounds=3)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.data_types import Federation
from polyfed.core.method import Method
from polyfed.core.workbench import ClientState
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

State = dict[str, Tensor]
PARAMETERS = tuple(name for name, _ in TinyNet().named_parameters())
STATISTICS = {name for name in TinyNet().state_dict() if "running" in name or "num_batches" in name}


def tiny_net() -> TinyNet:
    """The tiny model, always with the same weights."""
    torch.manual_seed(3)
    return TinyNet()


def built(
    method: str | Method,
    federation: Federation | dict[str, int] | None = None,
    model: nn.Module | None = None,
    **changes: Any,
) -> Experiment:
    """An experiment on the tiny federation, on one of clients of these sizes, or on another."""
    torch.manual_seed(3)
    values: dict[str, Any] = {"rounds": 2, "batch_size": 4, "lr": 0.05} | changes
    data = federation if isinstance(federation, Federation) else tiny_federation(federation)
    return Experiment(Settings(**values), data, method, model or TinyNet())


def trained(
    method: str | Method,
    federation: Federation | dict[str, int] | None = None,
    model: nn.Module | None = None,
    **changes: Any,
) -> Experiment:
    """The same, trained."""
    experiment = built(method, federation, model, **changes)
    experiment.train()
    return experiment


def digest_of(method: str | Method, federation: Federation | dict[str, int] | None = None, **changes: Any) -> str:
    """The digest of such a run."""
    return Result(trained(method, federation, **changes), []).digest


def client_of(experiment: Experiment, index: int = 0, round_number: int = 1) -> Client:
    """A client with what it keeps, ready to train."""
    data = experiment.federation.clients[index]
    state = experiment.backend.client_states.get(data.id, ClientState())
    client = Client(data, experiment.bench, state, round_number)
    client.receive(experiment.server.outgoing(client.id))
    client.model.train()
    return client


def prepared_batch(client: Client, count: int = 4) -> tuple[Tensor, Tensor]:
    """The first images of a client, prepared, and their labels."""
    x, y = client.data.train.batch(slice(0, count))
    return client.bench.preparation.for_testing(x), y


def batch_of(experiment: Experiment, count: int = 5) -> tuple[Client, Tensor, Tensor]:
    """The first client as it is before it has received anything, and its first images."""
    client = Client(experiment.federation.clients[0], experiment.bench, ClientState(), 1)
    return client, *prepared_batch(client, count)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    """All expected values are there, but for rounding."""
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
