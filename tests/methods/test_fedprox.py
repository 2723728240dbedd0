"""FedProx: the gradient of its term."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers import tiny_runs
from polyfed.core.client import Client
from polyfed.core.workbench import ClientState
from polyfed.errors import JoinError
from polyfed.methods.fedprox import Proximal
from polyfed.testing import tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_the_gradient_of_fedprox_is_the_formula() -> None:
    bench = trained("fedprox(mu=0.3)").bench
    client = Client(tiny_federation().clients[0], bench, ClientState(), 1)
    received = {name: value + 0.1 for name, value in bench.initial.items() if value.is_floating_point()}
    client.received = received
    x, y = client.data.train.batch(slice(0, 4))
    step = client.forward(0, bench.preparation.for_testing(x), y)
    bench.model.zero_grad()
    Proximal(0.3)(step).backward()  # type: ignore[no-untyped-call]
    for name, parameter in bench.parameters.items():
        expected = 0.3 * (parameter.detach() - received[name])
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected)
    value = float(Proximal(0.3)(step).detach())
    by_hand = 0.15 * sum(float(((p.detach() - received[n]) ** 2).sum()) for n, p in bench.parameters.items())
    assert value == pytest.approx(by_hand, rel=1e-5)


def test_fedprox_without_anything_received_is_an_error() -> None:
    with pytest.raises(JoinError, match="fedprox would be ignored"):
        trained("local + fedprox(mu=0.1)")
