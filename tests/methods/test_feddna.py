"""FedDNA: how statistics are combined, by hand; everything else is FedAvg."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from helpers.tiny_runs import STATISTICS, built, digest_of, trained
from helpers.watching import watched
from polyfed.methods.feddna import Importance, Moments

CLIENTS = [
    {"a.running_mean": [0.0, 1.0], "a.running_var": [1.0, 2.0]},
    {"a.running_mean": [0.5, 1.5], "a.running_var": [1.5, 1.0]},
    {"a.running_mean": [4.0, -3.0], "a.running_var": [0.2, 6.0]},
]


WEIGHTS = [5.0, 3.0, 2.0]


def kl(m: float, v: float, n: float, w: float) -> float:
    v, w = v + 1e-5, w + 1e-5
    return 0.5 * (math.log(w / v) + (v + (m - n) ** 2) / w - 1)


def by_hand(tau: float, iterations: int) -> dict[str, list[float]]:
    a = [w / sum(WEIGHTS) for w in WEIGHTS]
    merged: dict[str, list[float]] = {}
    for turn in range(iterations + 1):
        merged = {name: [sum(w * c[name][i] for w, c in zip(a, CLIENTS, strict=True)) for i in (0, 1)] for name in CLIENTS[0]}
        if turn < iterations:
            distances = []
            for c in CLIENTS:
                both = []
                for i in (0, 1):
                    own = (c["a.running_mean"][i], c["a.running_var"][i])
                    all_ = (merged["a.running_mean"][i], merged["a.running_var"][i])
                    both.append((kl(*own, *all_) + kl(*all_, *own)) / 2)
                distances.append(sum(both) / 2)
            raw = [math.exp(-d / tau) for d in distances]
            a = [r / sum(raw) for r in raw]
    return merged


@pytest.mark.parametrize(("tau", "iterations"), [(1.0, 3), (0.5, 1), (10.0, 2)])
def test_importance_weights_by_hand(tau: float, iterations: int) -> None:
    clients = [{name: torch.tensor(value) for name, value in client.items()} for client in CLIENTS]
    found = Importance(tau, iterations).combine(clients, WEIGHTS, {})
    for name, expected in by_hand(tau, iterations).items():
        assert found[name].tolist() == pytest.approx(expected, rel=1e-6)


def test_merged_moments_are_those_of_all_samples_together() -> None:
    generator = np.random.default_rng(0)
    samples = [generator.normal(k, 1 + k, (n, 2)) for k, n in enumerate((50, 30, 20))]
    clients = [{"a.running_mean": torch.tensor(s.mean(0)), "a.running_var": torch.tensor(s.var(0))} for s in samples]
    found = Moments().combine(clients, [50, 30, 20], {})
    union = np.concatenate(samples)
    np.testing.assert_allclose(found["a.running_mean"], union.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found["a.running_var"], union.var(0), rtol=1e-12)


def test_feddna_is_fedavg_but_for_statistics() -> None:
    assert digest_of("feddna(iterations=0)") == digest_of("fedavg")
    one, plain = trained("feddna", rounds=1).server.state, trained("fedavg", rounds=1).server.state
    differing = {name for name, value in plain.items() if not torch.equal(value, one[name])}
    assert differing == {name for name in STATISTICS if "running" in name}
    everything = set(plain)
    assert watched(built("feddna + agc(clip=1.28)"))[1, "train"] == (everything, everything)
