"""What CCST, ELCFS and COPA have in common: clients get something of all others."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from helpers.tiny_runs import built, trained
from polyfed.core.data_types import ArrayExamples
from polyfed.errors import DataError, JoinError
from polyfed.testing import tiny_federation


@pytest.mark.parametrize("name", ["ccst", "elcfs", "copa"])
def test_a_single_client_has_nobody_to_exchange_with(name: str) -> None:
    with pytest.raises(JoinError, match=f"Remove {name}"):
        built(f"central + {name}")


@pytest.mark.parametrize("name", ["ccst", "elcfs"])
def test_inputs_that_are_no_images_are_refused(name: str) -> None:
    federation = tiny_federation()
    flat = [
        dataclasses.replace(c, train=ArrayExamples(c.train.batch(slice(None))[0].flatten(1), c.train.labels))
        for c in federation.clients
    ]
    flat = [dataclasses.replace(c, tests={}, validation=None) for c in flat]
    experiment = built(name, dataclasses.replace(federation, clients=tuple(flat), unseen={}), nn.Sequential(nn.Linear(192, 3)))
    with pytest.raises(DataError, match=r"Use images"):
        experiment.train()


@pytest.mark.parametrize(
    "text",
    ["fedbn + ccst + agc", "fedbn + elcfs + fedprox(mu=0.1)", "elcfs + ccst", "fedbn + copa + agc", "copa + elcfs", "copa + ccst"],
)
def test_they_join_with_others(text: str) -> None:
    experiment = trained(text)
    assert all(torch.isfinite(value).all() for value in experiment.server.state.values())
    assert len(experiment.evaluate()) == 4
