"""FedAvgM, FedAdam, FedYogi and FedAdagrad: their steps against torch and the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.tiny_runs import PARAMETERS, State, assert_near, built, trained
from polyfed.core.method import parse
from polyfed.errors import JoinError


def stepped(method: str, steps: int = 3) -> tuple[list[State], list[State]]:
    """Made-up aggregates, and the server's states before and after each."""
    experiment = built(method)
    server, stream = experiment.server, torch.Generator().manual_seed(1)
    states, aggregates = [dict(server.state)], []
    for number in range(1, steps + 1):
        server.start_round(number, 0)
        made = {
            n: v + 0.01 * torch.randn(v.shape, generator=stream) if v.is_floating_point() else v + 1 for n, v in states[-1].items()
        }
        server.state = server.state | experiment.method.server_step(server, made)  # type: ignore[misc]
        aggregates.append(made)
        states.append(dict(server.state))
    return states, aggregates


@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("fedavgm(momentum=0.7, lr=0.5)", lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.7)),
        (
            "fedadagrad(lr=0.02, tau=0.003)",
            lambda p: torch.optim.Adagrad(p, lr=0.02, initial_accumulator_value=0.003**2, eps=0.003),
        ),
    ],
)
def test_server_steps_are_those_of_torch(method: str, make: Any) -> None:
    states, aggregates = stepped(method)
    parameters = {name: nn.Parameter(states[0][name].clone()) for name in PARAMETERS}
    optimizer = make(parameters.values())
    for after, aggregate in zip(states[1:], aggregates, strict=True):
        for name, parameter in parameters.items():
            parameter.grad = parameter.detach() - aggregate[name]
        optimizer.step()
        assert_near(after, {name: parameter.detach() for name, parameter in parameters.items()})
        plain = [name for name in after if name not in PARAMETERS]
        assert len(plain) == 6 and all(torch.equal(after[name], aggregate[name]) for name in plain)


@pytest.mark.parametrize("method", ["fedadam", "fedyogi"])
def test_adam_and_yogi_follow_the_papers_recurrence(method: str) -> None:
    states, aggregates = stepped(f"{method}(lr=0.03, beta1=0.8, beta2=0.95, tau=0.002)")
    for name in PARAMETERS:
        w = states[0][name].double().numpy()
        m, v = np.zeros_like(w), np.full_like(w, 0.002**2)
        for after, aggregate in zip(states[1:], aggregates, strict=True):
            delta = aggregate[name].double().numpy() - w
            m = 0.8 * m + 0.2 * delta
            v = 0.95 * v + 0.05 * delta**2 if method == "fedadam" else v - 0.05 * delta**2 * np.sign(v - delta**2)
            w = w + 0.03 * m / (np.sqrt(v) + 0.002)
            np.testing.assert_allclose(after[name].numpy(), w, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "text",
    [
        "fedadam(lr=0.002, beta1=0.0, beta2=1.0, tau=0.001)",
        "fedyogi(lr=0.002, beta1=0.0, beta2=1.0, tau=0.001)",
        "fedadagrad(lr=2000.0, tau=1000.0)",
    ],
)
def test_adaptive_steps_that_do_not_adapt_are_fedavg(text: str) -> None:
    assert_near(trained(text).server.state, trained("fedavg").server.state)


def test_only_what_is_sent_and_uploaded_is_stepped() -> None:
    seen = set()
    for text in ("fedavgm + silobn", "fedavgm + fedbn", "fedavgm + perxan"):
        experiment = trained(text)
        seen.add(len(experiment.server.memory["fedavgm"]))
        travels = experiment.bench.plan.at(1).travels
        assert all(travels[name].up and travels[name].down for name in experiment.server.memory["fedavgm"])
    assert seen == {9, 5, 11}  # perxan: 5 others, and scale, shift and score of two instance sides
    with pytest.raises(JoinError, match="has no effect with local"):
        built("local + fedavgm")
    with pytest.raises(JoinError, match="server_step"):
        parse("fedavgm + fedadam")
