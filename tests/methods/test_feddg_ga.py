"""FedDG-GA: weights by hand, and which scores they follow."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from helpers.tiny_runs import batch_of, trained
from helpers.watching import messages
from polyfed.core.server import Server
from polyfed.errors import DataError, TooFewReplies
from polyfed.methods import feddg_ga
from polyfed.testing import SIZES, tiny_federation


def test_feddg_ga_weights_by_hand() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    gaps = {"a": 0.1, "b": 0.4, "c": -0.2}
    # Centred: 0, 0.3, -0.3; over 0.3: 0, 1, -1; times 0.6/3.
    assert feddg_ga.adjusted(weights, gaps, 0.6, True) == pytest.approx({"a": 0.5, "b": 0.5, "c": 0.0})
    plain = np.clip(np.array([0.5, 0.3, 0.2]) + 0.2 * np.array([0.1, 0.4, -0.2]) / 0.4, 0, 1)
    assert list(feddg_ga.adjusted(weights, gaps, 0.6, False).values()) == pytest.approx(list(plain / plain.sum()))


def test_feddg_ga_weights_stay_on_the_simplex_and_equal_gaps_change_nothing() -> None:
    stream = np.random.default_rng(0)
    for _ in range(50):
        weights = dict(zip("abcd", stream.dirichlet(np.ones(4) * 0.3), strict=True))
        gaps = dict(zip("abcd", stream.normal(size=4), strict=True))
        new = feddg_ga.adjusted(weights, gaps, 1.0, bool(stream.integers(2)))
        assert sum(new.values()) == pytest.approx(1) and all(0 <= value <= 1 for value in new.values())
        assert feddg_ga.adjusted(weights, dict.fromkeys("abcd", gaps["a"]), 1.0, True) == weights
    assert feddg_ga.adjusted({"a": 0.7, "b": 0.3}, {"a": 0.0, "b": 0.0}, 1.0, False) == {"a": 0.7, "b": 0.3}
    assert feddg_ga.adjusted({"a": 0.7, "b": 0.3}, {}, 1.0, True) == {"a": 0.7, "b": 0.3}


def test_feddg_ga_pairs_a_round_with_the_model_it_was_averaged_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = messages(monkeypatch)
    experiment = trained("feddg_ga(step=0.9)", rounds=3)
    told = {(ask.round, reply.client): reply.extras for ask, reply in seen}
    assert all(set(extras) == {feddg_ga.BEFORE, feddg_ga.AFTER} for extras in told.values()) and len(told) == 9
    weights = dict.fromkeys(SIZES, 1 / 3)
    for number in (2, 3):
        gaps = {c: told[number, c][feddg_ga.BEFORE] - told[number - 1, c][feddg_ga.AFTER] for c in SIZES}
        weights = feddg_ga.adjusted(weights, gaps, 0.9 * (1 - (number - 2) / 3), True)
    entries = {reply.client: reply.entries["head.weight"].double() for ask, reply in seen if ask.round == 3}
    mean = sum(weights[c] * entries[c] for c in SIZES)
    torch.testing.assert_close(experiment.server.state["head.weight"].double(), mean, rtol=1e-5, atol=1e-7)
    assert experiment.server.memory["feddg_ga"]["weights"] == pytest.approx(weights)
    assert max(weights.values()) - min(weights.values()) > 0.1


def test_feddg_ga_repeats_a_round_from_the_weights_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("feddg_ga(step=0.9)", rounds=3).server
    aggregate, failed = Server.aggregate, []

    def failing_once(server: Server, replies: Any) -> None:
        if server.round == 2 and not failed:
            failed.append(dict(server.memory["feddg_ga"]["round"]))
            raise TooFewReplies("nobody answered")
        aggregate(server, replies)

    monkeypatch.setattr(Server, "aggregate", failing_once)
    repeated = trained("feddg_ga(step=0.9)", rounds=3).server
    assert failed == [dict.fromkeys(SIZES, 2)] and repeated.attempt == whole.attempt == 0
    assert repeated.memory["feddg_ga"] == whole.memory["feddg_ga"]


def test_feddg_ga_scores_validation_data_and_leaves_modes_alone() -> None:
    experiment = trained("feddg_ga", rounds=1)
    client, _, _ = batch_of(experiment)
    model = experiment.bench.model.train()
    model.stem[1].eval()  # type: ignore[index, union-attr]
    held = client.data.validation
    assert held is not None
    x, y = held.batch(slice(0, len(held)))
    found = feddg_ga.badness(client, "loss"), feddg_ga.badness(client, "accuracy")
    assert model.training and not model.stem[1].training and model.branch[1].training  # type: ignore[index, union-attr]
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(experiment.bench.preparation.for_testing(x))
    assert found[0] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    assert found[1] == pytest.approx(float((logits.argmax(1) != y).float().mean()))
    bare = tiny_federation()
    for item in bare.clients:
        object.__setattr__(item, "validation", None)
    with pytest.raises(DataError, match="feddg_ga needs"):
        trained("feddg_ga", bare)
