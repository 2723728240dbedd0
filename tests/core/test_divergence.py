"""Training that diverges says so, and what to do; labels that are no class are refused before round 1."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

from polyfed import Method, run
from polyfed.core.data_types import ArrayExamples
from polyfed.errors import DataError, PolyfedError
from polyfed.testing import TinyNet, tiny_federation


def explode(step: Any) -> None:
    """Make the last step of a round one too many, as a large learning rate does."""
    for parameter in step.client.bench.model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(torch.inf)


def test_divergence_is_said_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "polyfed")
    with pytest.raises(PolyfedError, match=r"(?i)diverged.*learning rate"):
        run(tiny_federation(), Method("explode", gradients=(explode,)), TinyNet, rounds=3, local_steps=1, batch_size=8)
    assert not any("repeated" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("label", [-1, 1000])
def test_a_label_that_is_no_class_is_refused_with_its_client(label: int) -> None:
    federation = tiny_federation()
    first = federation.clients[0]
    x, y = first.train.batch(slice(None))
    y = torch.cat([y[:-1], torch.tensor([label])])
    broken = dataclasses.replace(
        federation, clients=(dataclasses.replace(first, train=ArrayExamples(x, y)), *federation.clients[1:])
    )
    with pytest.raises(DataError, match=f"{first.id}.*{label}"):
        run(broken, "fedavg", TinyNet, rounds=1)
