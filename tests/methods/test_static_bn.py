"""Static batch norm: statistics are gathered for evaluations only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.tiny_runs import STATISTICS, built, trained
from helpers.watching import watched
from polyfed.core.client import Client
from polyfed.core.workbench import ClientState
from polyfed.errors import JoinError, SharingError
from polyfed.testing import TinyNet


def test_static_bn_trains_the_weights_of_fedavg() -> None:
    static, plain = trained("static_bn", momentum=0.9).server.state, trained("fedavg", momentum=0.9).server.state
    assert all(torch.equal(static[name], value) for name, value in plain.items() if name not in STATISTICS)
    assert torch.equal(static["stem.1.running_mean"], torch.zeros(8))


def test_static_statistics_are_the_mean_over_all_batches_of_all_clients() -> None:
    experiment = trained("static_bn")
    experiment.evaluate()
    state = experiment.server.state
    model = TinyNet()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    seen = []
    for data in experiment.federation.clients:
        order = torch.randperm(len(data.train), generator=Client(data, experiment.bench, ClientState(), 2).generator)
        cuts = {13: (4, 8), 8: (4,), 5: ()}[len(data.train)]
        for chunk in np.split(order.numpy(), cuts):
            x = experiment.bench.preparation.for_testing(data.train.batch(torch.tensor(chunk))[0])
            maps = model.stem[0](x).detach().double().numpy()
            seen.append((maps.mean((0, 2, 3)), maps.transpose(1, 0, 2, 3).reshape(8, -1).var(1, ddof=1)))
    assert len(seen) == 6 == int(state["stem.1.num_batches_tracked"])
    np.testing.assert_allclose(state["stem.1.running_mean"], np.mean([m for m, _ in seen], 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state["stem.1.running_var"], np.mean([v for _, v in seen], 0), rtol=1e-4, atol=1e-6)
    assert all(norm.momentum == 0.1 for norm in experiment.bench.batch_norms)


def test_static_statistics_go_up_only_for_evaluations_and_once_a_model() -> None:
    experiment = built("static_bn")
    seen = watched(experiment)
    everything = set(TinyNet().state_dict())
    assert seen[2, "train"] == (everything, everything - STATISTICS)
    experiment.evaluate()
    assert seen[2, "static_bn_statistics"] == (everything, STATISTICS)
    before = experiment.costs.messages["evaluation"]
    rows = experiment.evaluate()
    assert experiment.costs.messages["evaluation"] == before + 3 and len(rows) == 4
    experiment.server.state["head.weight"] = experiment.server.state["head.weight"] + 1
    experiment.evaluate()
    assert experiment.costs.messages["evaluation"] == before + 3 + 6


@pytest.mark.parametrize(
    ("other", "why"),
    [("fixbn", "both set"), ("fedbn", "both set"), ('fedavg(statistics="drop")', "has no effect in combination")],
)
def test_static_bn_alone_decides_over_statistics(other: str, why: str) -> None:
    with pytest.raises((JoinError, SharingError), match=why):
        built(f"static_bn + {other}")
