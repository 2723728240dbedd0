"""Momentum that lasts over rounds."""

from __future__ import annotations

import functools

import torch
from torch import nn

from helpers import tiny_runs
from polyfed.core.seeds import generator
from polyfed.testing import TinyNet, tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_global_momentum_with_one_client_is_uninterrupted_training() -> None:
    federation = tiny_federation({"only": 12})
    kept = {
        keep: trained(f'momentum(keep="{keep}")', federation, momentum=0.9, lr=0.02).server.state
        for keep in ("global", "local", "none")
    }
    torch.manual_seed(3)
    model = TinyNet().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for number in (1, 2, 3):
        for chunk in torch.randperm(12, generator=generator(0, "client", number, "only")).split(4):
            x, y = federation.clients[0].train.batch(chunk)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(federation.preparation.for_testing(x)), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(kept["global"][name], value) and torch.equal(kept["local"][name], value), name
    assert not torch.equal(kept["none"]["head.weight"], model.state_dict()["head.weight"])
