"""Check the gradient bias of each norm, against numpy where possible."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from helpers import tiny_runs
from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.studies.analyse.gradient_bias import GradientBias, gradient_bias, gradient_bias_of
from polyfed.testing import TinyNet, tiny_federation

MODULE = sys.modules[gradient_bias.__module__]
NORMS = {"batch norm": "fedavg", "group norm": "fedavg + group_norm(groups=2)", "fixed": "fixbn(freeze_at=0)"}


class NormThenHead(nn.Module):
    """Batch norm and a linear layer, with a closed-form gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False, eps=1e-5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def two_clients(shift: float, scale: float) -> Federation:
    """Return two clients with ten rows each; the second one has the rows of the first, scaled and shifted."""
    stream = torch.Generator().manual_seed(5)
    x, y = torch.randn(10, 4, generator=stream), torch.arange(10) % 3
    clients = [
        ClientData(name, (name,), ArrayExamples(rows, y), {name: ArrayExamples(rows, y)})
        for name, rows in (("a", x), ("b", scale * x + shift))
    ]
    return Federation("two", ("0", "1", "2"), tuple(clients))


def head_gradient(x: np.ndarray, y: np.ndarray, groups: list[np.ndarray], weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the head's gradient with rows normalised per group, as a weighted mean over groups."""
    total = np.zeros((3, 5))
    for rows in groups:
        normalised = (x[rows] - x[rows].mean(0)) / np.sqrt(x[rows].var(0) + 1e-5)
        scores = np.exp(normalised @ weight.T + bias)
        error = scores / scores.sum(1, keepdims=True) - np.eye(3)[y[rows]]
        total += np.concatenate([error.T @ normalised, error.sum(0)[:, None]], 1) / len(x)
    return total


def test_the_bias_of_batch_norm_equals_a_manual_calculation() -> None:
    federation = two_clients(shift=3.0, scale=2.0)
    torch.manual_seed(1)
    model = NormThenHead()
    (found,) = gradient_bias(federation, model, ["fedavg"], batch_size=10, draws=1)
    x = np.concatenate([client.train.batch(slice(None))[0].double().numpy() for client in federation.clients])
    y = np.concatenate([client.train.labels.numpy() for client in federation.clients])
    weight, bias = model.head.weight.detach().double().numpy(), model.head.bias.detach().double().numpy()
    central = head_gradient(x, y, [np.arange(20)], weight, bias)
    local = head_gradient(x, y, [np.arange(10), np.arange(10, 20)], weight, bias)
    expected = np.linalg.norm(local - central) / np.linalg.norm(central)
    assert found.bias == pytest.approx(expected, rel=1e-4) and expected > 0.3
    assert found.cosine == pytest.approx((local * central).sum() / np.linalg.norm(local) / np.linalg.norm(central), rel=1e-4)
    assert found.layers == {"head": pytest.approx(expected, rel=1e-4)}


class Widening(NormThenHead):
    """Keeps 4,000 bytes per row for the gradient, and records the largest batch."""

    largest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Widening.largest = max(Widening.largest, len(x))
        logits = self.head(self.norm(x))
        wide: torch.Tensor = logits.sum(1, keepdim=True).repeat(1, 1000)
        return logits + wide.square().mean(1, keepdim=True)


@pytest.mark.parametrize(("memory", "clients", "largest"), [(10**9, 2, 20), (50_000, 2, 12), (1, 2, 4)])
def test_the_union_of_batches_stays_within_memory(memory: int, clients: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "MEMORY", memory)
    monkeypatch.setattr(Widening, "largest", 0)
    (found,) = gradient_bias(two_clients(shift=3.0, scale=2.0), Widening(), ["fedavg"], batch_size=10, draws=1)
    assert Widening.largest == largest and len(found.clients) == clients and found.bias > 0.01


def test_clients_are_omitted_if_four_images_each_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "MEMORY", 50_000)
    few = two_clients(shift=3.0, scale=2.0)
    many = tuple(ClientData(f"{one.id}{n}", one.domains, one.train, one.tests) for n in range(10) for one in few.clients)
    monkeypatch.setattr(Widening, "largest", 0)
    (found,) = gradient_bias(Federation("many", few.classes, many), Widening(), ["fedavg"], batch_size=10, draws=1)
    assert len(found.clients) == 3 and Widening.largest == 12


def test_equal_clients_have_no_bias_even_with_batch_norm() -> None:
    (found,) = gradient_bias(two_clients(shift=0.0, scale=1.0), NormThenHead(), ["fedavg"], batch_size=10, draws=1)
    assert found.bias < 1e-5 and found.cosine == pytest.approx(1)
    assert all(value < 1e-5 for value in found.clients.values())
    assert found.shuffled > 0.01  # random batches of ten of the twenty rows differ


def test_norms_without_batch_statistics_have_no_bias() -> None:
    found = {one.norm: one for one in gradient_bias(tiny_federation(), TinyNet(), NORMS, batch_size=8, draws=2)}
    assert found["batch norm"].bias > 0.05
    assert found["group norm"].bias < 1e-5 and found["fixed"].bias < 1e-5
    assert set(found["batch norm"].clients) == {"big", "middle", "small"}
    assert max(found["batch norm"].clients.values()) > 0.05 and max(found["fixed"].clients.values()) < 1e-5
    assert found["batch norm"].layers.keys() == {"stem.0", "stem.1", "branch.0", "branch.1", "head"}


def test_measuring_a_trained_run_does_not_change_it() -> None:
    experiment = tiny_runs.trained("fedavg", rounds=1)
    before = {name: value.clone() for name, value in experiment.server.state.items()}
    found: GradientBias = gradient_bias_of(experiment, draws=1)
    assert found.norm == "fedavg" and found.bias > 0.01
    assert gradient_bias_of(experiment, draws=1, fixed_statistics=True).bias < 1e-5
    assert gradient_bias_of(experiment, draws=1) == found
    assert all(torch.equal(experiment.server.state[name], value) for name, value in before.items())
