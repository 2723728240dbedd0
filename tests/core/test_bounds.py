"""Capped weights and bounded updates: they do nothing unless asked for, and what they promise when they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyfed
from polyfed.core.reducers import bounded, capped
from polyfed.errors import SettingError
from polyfed.runs.experiment import Experiment
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings
from polyfed.testing import tiny_federation


@given(st.lists(st.floats(0.5, 1e9), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_no_share_is_above_the_cap_and_no_weight_grows(weights: list[float], share: float) -> None:
    found = capped(tuple(weights), share)
    most = max(share, 1 / len(weights))
    assert all(value <= most * math.fsum(found) * (1 + 1e-9) for value in found)
    if share * len(weights) > 1:
        assert all(after <= before for after, before in zip(found, weights, strict=True))
    if max(weights) <= share * math.fsum(weights):
        assert found == tuple(weights)


def test_a_small_update_stays_as_it_is_and_a_large_one_is_scaled_to_the_norm() -> None:
    start = {"w": torch.zeros(3), "n": torch.zeros((), dtype=torch.int64)}
    entries = {"w": torch.tensor([3.0, 4.0, 0.0]), "n": torch.ones((), dtype=torch.int64)}
    same, norm = bounded(entries, start, 5.0)
    assert same is entries and norm == 5.0
    found, norm = bounded(entries, start, 1.0)
    assert norm == 5.0
    assert torch.allclose(found["w"], torch.tensor([0.6, 0.8, 0.0]))
    assert int(found["n"]) == 1


def small(**changes: object) -> Experiment:
    settings = Settings(model="polyfed.testing:TinyNet", rounds=1, batch_size=4, local_steps=3, **changes)  # type: ignore[arg-type]
    return Experiment(settings.trusted(), tiny_federation({"big": 40, "middle": 8, "small": 8}))


def test_no_client_moves_the_model_further_than_the_norm() -> None:
    before = {name: value.clone() for name, value in small().server.state.items()}
    server = train_run(small(max_update_norm=1e-3), None).experiment.server
    moved = math.sqrt(
        sum(
            float((server.state[name].double() - value.double()).square().sum())
            for name, value in before.items()
            if value.is_floating_point()
        )
    )
    assert 0 < moved <= 1e-3 * (1 + 1e-5)


def test_the_bounds_change_nothing_where_nobody_exceeds_them() -> None:
    assert train_run(small(max_weight_share=0.99, max_update_norm=1e6), None).digest == train_run(small(), None).digest


@pytest.mark.parametrize("method", ["fedavg", "fednova", "scaffold"])
def test_a_capped_client_counts_for_less(method: str) -> None:
    assert train_run(small(method=method, max_weight_share=0.5), None).digest != train_run(small(method=method), None).digest


def test_a_method_with_weights_of_its_own_is_not_capped_in_silence() -> None:
    with pytest.raises(SettingError, match=r"--max-weight-share has no effect with feddg_ga"):
        small(method="feddg_ga", max_weight_share=0.5)


def test_bounds_that_make_no_sense_are_refused() -> None:
    for setting, value in [
        ("max_weight_share", 0.0),
        ("max_weight_share", 1.5),
        ("max_update_norm", 0.0),
        ("max_update_norm", math.inf),
    ]:
        with pytest.raises(SettingError, match=setting):
            polyfed.run("digits-mini", **{setting: value})
