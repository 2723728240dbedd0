"""FedGMA: masks by hand, and identities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.tiny_runs import trained
from polyfed.core.reducers import Mean
from polyfed.methods.fedgma import MaskedMean
from polyfed.testing import tiny_federation


@pytest.mark.parametrize("variant", ["masked_delta", "average_plus_step"])
def test_fedgma_by_hand(variant: str) -> None:
    start = np.array([1.0, 0.0, 2.0, -1.0], dtype=np.float32)
    clients = np.array([[2, 1, 3, -1], [3, -1, 1, -1], [1.5, 4, 1, -2]], dtype=np.float32)
    weights = np.array([5.0, 3.0, 2.0])
    folding = MaskedMean(0.6, 0.5, variant).start({"w": torch.tensor(start)})
    for values, weight in zip(clients, weights, strict=True):
        folding.add({"w": torch.tensor(values), "count": torch.tensor(int(weight))}, float(weight))
    update = (weights[:, None] * (clients - start)).sum(0) / 10
    # Signs: +++ (1), +-+ (1/3), +-- (1/3), 00- (1/3); only the first reaches 0.6.
    mask = np.array([1, 1 / 3, 1 / 3, 1 / 3])
    step = 0.5 * mask * update
    expected = start + step if variant == "masked_delta" else start + update + step
    found = folding.finish()
    np.testing.assert_allclose(found["w"].numpy(), expected, rtol=1e-5)
    assert int(found["count"]) == 5


def test_fedgma_with_unanimous_signs_is_the_mean_to_the_bit() -> None:
    stream = torch.Generator().manual_seed(1)
    start = torch.randn(50, generator=stream)
    clients = [start + torch.rand(50, generator=stream) + 0.1 for _ in range(3)]
    masked = MaskedMean(0.9, 1.0, "masked_delta").start({"w": start})
    for number, client in enumerate(clients):
        masked.add({"w": client}, number + 1.0)
    plain = Mean().start({})
    for number, client in enumerate(clients):
        plain.add({"w": client}, number + 1.0)
    assert torch.equal(masked.finish()["w"], plain.finish()["w"])


def test_fedgma_masks_parameters_only_and_one_client_is_fedavg() -> None:
    masked, plain = trained("fedgma(tau=1.0)", rounds=1), trained("fedavg", rounds=1)
    same = {name for name, value in masked.server.state.items() if torch.equal(value, plain.server.state[name])}
    assert {name for name in masked.server.state if "running" in name or "num_batches" in name} <= same
    assert not same & {"stem.0.weight", "branch.0.weight", "head.weight"}
    alone = {"only": 12}
    one = trained("fedgma(tau=1.0)", tiny_federation(alone))
    assert torch.equal(one.server.state["stem.0.weight"], trained("fedavg", tiny_federation(alone)).server.state["stem.0.weight"])
    assert all(travel.words == "shared" for travel in masked.bench.plan.at(1).travels.values())
