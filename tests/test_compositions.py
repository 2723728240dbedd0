"""The compositions that the papers compare train by one line, and each part of them has its effect."""

from __future__ import annotations

import pytest
import torch

from polyfed.experiment import Experiment
from polyfed.method import methods, parse
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation
from polyfed.text import read_sum

PRINTED = (
    "guiding + ibn",
    "guiding + dson",
    "guiding + elcfs",
    "guiding + ccst",
    "fedavg + agc",
    "fixbn + agc",
    "silobn + agc",
    "fedbn + agc",
    "fedavg + mixstyle",
    "fedavg + rsc",
)


def trained(method: str) -> Experiment:
    torch.manual_seed(5)
    # Two rounds where the second differs from the first (fixbn freezes half-way); one is enough for the others.
    rounds = 2 if "fixbn" in method else 1
    experiment = Experiment(Settings(method=method, rounds=rounds, batch_size=4, lr=0.1), tiny_federation(), model=TinyNet())
    experiment.train()
    return experiment


def head_of(experiment: Experiment) -> torch.Tensor:
    return experiment.server.state["head.weight"]


@pytest.mark.parametrize("text", PRINTED)
def test_compositions_of_the_papers_train(text: str) -> None:
    names = [call.name for call in read_sum(text)]
    missing = [name for name in names if name not in methods.names()]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not registered yet")
    both = trained(text)
    assert {atom.name for atom in parse(text).atoms} >= {name for name in names if name != "fedavg"}
    assert all(torch.isfinite(value).all() for value in both.server.state.values())
    rows = both.evaluate()
    assert {row.view for row in rows} == {"seen", "unseen"}
    for name in names:
        if name not in ("fedavg", "silobn", "fedbn"):  # what only shares shows in later rounds
            rest = " + ".join(other for other in names if other != name) or "fedavg"
            assert not torch.equal(head_of(both), head_of(trained(rest))), f"{name} has no effect in {text}"
