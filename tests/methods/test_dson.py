"""DSON: the layer against numpy, an identity, and what travels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from helpers.networks import used_norm
from helpers.tiny_entries import AFFINE, PLAIN, STATISTICS, under
from helpers.tiny_runs import trained
from helpers.watching import messages
from polyfed.errors import ModelError
from polyfed.methods.dson import DSON
from polyfed.testing import SIZES


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_dson_against_numpy(exact: bool, training: bool) -> None:
    norm, x = used_norm(3).train(training), torch.randn(4, 3, 5, 2) * 2 + 1
    layer = DSON(norm, 0.4, exact)
    a, w = x.double().numpy(), 1 / (1 + np.exp(-0.4))
    running = [value.double().numpy().reshape(1, 3, 1, 1) for value in (norm.running_mean, norm.running_var)]  # type: ignore[union-attr]
    mean, variance = (a.mean((0, 2, 3), keepdims=True), a.var((0, 2, 3), keepdims=True)) if training else running
    own_mean, own_variance = a.mean((2, 3), keepdims=True), a.var((2, 3), keepdims=True)
    mu = w * mean + (1 - w) * own_mean
    sigma2 = w * variance + (1 - w) * own_variance + (w * (1 - w) * (mean - own_mean) ** 2 if exact else 0)
    scale, shift = (value.detach().double().numpy().reshape(1, 3, 1, 1) for value in (norm.weight, norm.bias))
    expected = (a - mu) / np.sqrt(sigma2 + 1e-5) * scale + shift
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    norm(x)
    torch.testing.assert_close(layer.running_mean, norm.running_mean)
    torch.testing.assert_close(layer.running_var, norm.running_var)


def test_dson_with_batch_statistics_only_is_fedavg() -> None:
    ours, plain = trained("dson(score=10000.0)", momentum=0.9), trained("fedavg", momentum=0.9)
    for name, value in plain.server.state.items():
        torch.testing.assert_close(ours.server.state[name], value, rtol=0, atol=1e-5)
    assert float(ours.server.state["stem.1.score"]) == 10000.0


def test_dson_travels_whole_or_stays_with_the_domain() -> None:
    experiment = trained("dson", rounds=1)
    assert all(travel.words == "shared" for travel in experiment.bench.plan.at(1).travels.values())
    assert float(experiment.server.state["stem.1.score"].abs()) > 0
    own = trained("dson(domain_specific=True)", rounds=1)
    local = {name for name, travel in own.bench.plan.at(1).travels.items() if travel.words == "local"}
    assert local == {name for name in own.server.state if name.startswith(("stem.1.", "branch.1."))}
    assert {"stem.1.score", "stem.1.running_mean", "stem.1.weight"} <= local
    assert [row.domain for row in own.evaluate(newcomer="ensemble") if row.view == "unseen"] == ["new"]
    with pytest.raises(ModelError, match="no batch norm of feature maps"):
        trained("dson", model=nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))


def test_dson_of_domains_keeps_its_norms_out_of_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    experiment = trained("dson(domain_specific=True)")
    own = {name for layer in ("stem.1", "branch.1") for name in under(layer, *AFFINE, *STATISTICS, "score")}
    for ask, reply in seen:
        assert set(ask.payloads[reply.client].entries) == set(reply.entries) == PLAIN - own
        assert not ask.payloads[reply.client].extras and not reply.extras
    assert [set(experiment.backend.client_states[client].entries) for client in SIZES] == [own] * 3
