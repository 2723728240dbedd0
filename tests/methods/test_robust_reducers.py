"""Median, trimmed mean and Krum: numbers by hand, and a client that lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers.tiny_runs import State, built, digest_of, trained
from polyfed.errors import SharingError
from polyfed.methods.robust_reducers import Krum, Median, TrimmedMean, cut_at_each_end, squared_distances
from polyfed.runs.experiment import Experiment


def made_up(clients: int, seed: int = 0) -> list[State]:
    stream = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(4, 3, generator=stream), "n": torch.tensor(k)} for k in range(clients)]


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_the_median_is_numpys(clients: int) -> None:
    sent = made_up(clients)
    found = Median().combine(sent, [float(k + 1) for k in range(clients)], {})
    np.testing.assert_allclose(found["w"], np.median(np.stack([s["w"].numpy() for s in sent]), axis=0), rtol=1e-6)
    assert torch.equal(found["n"], torch.tensor(clients - 1))


@pytest.mark.parametrize("text", ["median", "trimmed_mean", "krum"])
def test_of_a_single_client_every_reducer_is_fedavg_to_the_bit(text: str) -> None:
    assert digest_of(text, {"only": 12}) == digest_of("fedavg", {"only": 12})


def test_the_trimmed_mean_is_scipys_and_weighted_by_hand() -> None:
    trim_mean = pytest.importorskip("scipy.stats").trim_mean
    sent = made_up(10)
    found = TrimmedMean(0.2).combine(sent, [1.0] * 10, {})
    np.testing.assert_allclose(found["w"], trim_mean(np.stack([s["w"].numpy() for s in sent]), 0.2, axis=0), rtol=1e-5)
    rows = [{"w": torch.tensor([v])} for v in (9.0, 1.0, 4.0, -7.0)]
    assert TrimmedMean(0.25).combine(rows, [1.0, 3.0, 1.0, 5.0], {})["w"].item() == pytest.approx((3 * 1 + 1 * 4) / 4)
    assert [cut_at_each_end(0.1, count) for count in (1, 2, 3, 10, 30, 31)] == [0, 0, 1, 1, 3, 4]


def test_krum_scores_by_hand() -> None:
    places = [0.0, 1.0, 3.0, 10.0, 100.0]
    sent = [{"w": torch.tensor([p]), "s": torch.tensor([0.0, 2 * p]), "n": torch.tensor(k)} for k, p in enumerate(places)]
    # 5 - 1 - 2 = 2 neighbours; squared distances are 5 times those on the line: 0: 1+9, 1: 1+4, 3: 4+9, 10: 49+81, 100: far
    rows = torch.tensor(places, dtype=torch.float64)
    scores = Krum(1, 1).scores(5 * (rows[:, None] - rows).square())
    assert scores.tolist() == pytest.approx([50, 25, 65, 650, 5 * (8100 + 97**2)])
    found = Krum(1, 1).combine(sent, [1.0] * 5, {})
    assert {name: value.tolist() for name, value in found.items()} == {"w": [1.0], "s": [0.0, 2.0], "n": 1}
    found = Krum(1, 3).combine(sent, [1.0, 2.0, 1.0, 9.0, 9.0], {})
    assert found["w"].item() == pytest.approx(5 / 4) and found["n"].item() == 2


def test_krum_adds_squared_distances_over_all_entries() -> None:
    sent = [entries | {"s": torch.randn(5, generator=torch.Generator().manual_seed(k))} for k, entries in enumerate(made_up(4))]
    rows = np.stack([np.concatenate((entries["w"].numpy().ravel(), entries["s"].numpy())) for entries in sent]).astype(float)
    expected = ((rows[:, None] - rows) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances(sent), expected, rtol=1e-12)
    # 5 - 1 - 2 = 2 neighbours. The last: 5 + 5 squared, 4.47 plain; the second: 1 + 10 squared, 4.16 plain.
    places = [(0.0, 0.0), (1.0, 0.0), (5.0, 0.0), (2.0, 3.0), (4.0, 2.0)]
    sent = [{"w": torch.tensor([w]), "s": torch.tensor([[s]])} for w, s in places]
    assert Krum(1, 1).chosen(sent) == [4]


def replies_with_a_liar(method: str, liar: str = "c") -> tuple[Experiment, dict[str, State]]:
    """One round in which one client sends nonsense."""
    experiment = built(method, {"a": 8, "b": 9, "c": 10, "d": 11, "e": 12}, rounds=1)
    reply, sent = experiment.backend.accept, {}

    def lie(ask: Any, outcome: Any) -> Any:
        made = reply(ask, outcome)
        if outcome.client == liar:
            for value in made.entries.values():  # type: ignore[union-attr]
                value.add_(1000 if value.is_floating_point() else 0)
        sent[outcome.client] = dict(made.entries)  # type: ignore[union-attr]
        return made

    experiment.backend.accept = lie  # type: ignore[method-assign]
    experiment.train()
    return experiment, sent


def test_robust_reducers_withstand_a_liar() -> None:
    experiment, sent = replies_with_a_liar("krum")
    state = experiment.server.state
    chosen = [client for client, entries in sent.items() if all(torch.equal(state[n], v) for n, v in entries.items())]
    assert len(chosen) == 1 and chosen != ["c"]
    for text in ("median", "trimmed_mean", "median + fedbn"):
        experiment, sent = replies_with_a_liar(text)
        assert all(bool((value.abs() < 50).all()) for value in experiment.server.state.values() if value.is_floating_point()), text
    experiment, _ = replies_with_a_liar("fedavg")
    assert bool((experiment.server.state["head.bias"] > 100).all())


def test_reducers_upload_what_fedavg_uploads_and_say_what_they_cannot() -> None:
    plain = trained("fedavg").costs.bytes
    for text in ("median", "trimmed_mean", "krum"):
        assert trained(text).costs.bytes == plain, text
    assert any("5 or more" in note for note in built("krum").notices)
    assert not any("krum" in note for note in built("krum(faulty=0)").notices)
    with pytest.raises(SharingError, match="how it is reduced"):
        built("median + krum")
    experiment = trained('krum + momentum(keep="global")', momentum=0.9)
    assert experiment.server.phase.travels["optimizer/momentum_buffer/head.bias"].reduce == Krum(1, 1)
