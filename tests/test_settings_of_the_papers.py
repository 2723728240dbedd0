"""The five seed methods in the papers' other settings: tiny batches, a tenth of many clients, skewed labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.build import build_federation
from polyfed.errors import SettingError
from polyfed.experiment import Experiment
from polyfed.method import parse
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

SEED_METHODS = ("fedwon", "fixbn", "fedstein", "gperxan", "hfedf", "pfedhn")


def trained(method: str, federation: Any, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    experiment = Experiment(Settings(method=method, rounds=2, lr=0.01, **changes), federation, model=TinyNet())
    experiment.train()
    return experiment


def assert_scored(experiment: Experiment, domains: int) -> None:
    rows = [row for row in experiment.evaluate() if row.view == "seen"]
    assert len({row.domain for row in rows}) == domains
    assert all(0 <= row.numbers["accuracy"] <= 1 for row in rows)
    assert all(bool(torch.isfinite(value).all()) for value in experiment.server.state.values())


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("method", SEED_METHODS)
def test_tiny_batches(method: str, batch: int) -> None:
    smallest = parse(method).facts.smallest_batch or 2
    if batch == 1 and smallest > 1:
        with pytest.raises(SettingError, match="batches of one sample"):
            trained(method, tiny_federation(), batch_size=batch)
        return
    assert_scored(trained(method, tiny_federation(), batch_size=batch), domains=3)


@pytest.mark.parametrize(("clients", "sampled"), [(100, 10), (1000, 100)])
@pytest.mark.parametrize("method", SEED_METHODS)
def test_a_tenth_of_many_clients(method: str, clients: int, sampled: int) -> None:
    federation = tiny_federation({f"client{number:04}": 2 + number % 3 for number in range(clients)})
    experiment = trained(method, federation, batch_size=2, clients_per_round=sampled, local_steps=1)
    taken = set(experiment.delivery.kept) if experiment.bench.plan.has_local_entries else set()
    assert len(taken) <= 2 * sampled, "only who took part keeps something"
    assert experiment.ledger.messages["training"] == 2 * sampled


@pytest.mark.parametrize("method", SEED_METHODS)
def test_skewed_labels(method: str) -> None:
    stream = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.rand(90, 3, 8, 8, generator=stream) + torch.nn.functional.one_hot(y, 3).float()[:, :, None, None]
    settings = Settings(partition="dirichlet(clients=5, alpha=0.5, least=2)")
    federation = build_federation({"only": ((x, y), (x[:9], y[:9]))}, settings)
    shares = torch.stack([torch.bincount(client.train.labels, minlength=3) for client in federation.clients]).double()
    assert (shares / shares.sum(1, keepdim=True)).std(0).max() > 0.1, "labels are skewed"
    assert_scored(trained(method, federation, batch_size=4), domains=1)
