"""Local work: steps, last batches, and losses that are not finite."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers import tiny_runs
from polyfed.core.client import batch_indices
from polyfed.errors import DataError, NotFinite, SettingError
from polyfed.settings import Settings
from polyfed.testing import tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_local_work_in_steps() -> None:
    experiment = trained("fedavg", rounds=1, local_steps=7)
    assert experiment.server.state["stem.1.num_batches_tracked"] == 7


@pytest.mark.parametrize(("policy", "batches"), [("merge", 3), ("drop", 3), ("keep", 4)])
def test_a_last_batch_of_one_follows_the_stated_choice(policy: str, batches: int) -> None:
    experiment = trained("fedavg", tiny_federation({"one": 13}), rounds=1, last_batch=policy)
    assert experiment.server.state["stem.1.num_batches_tracked"] == batches


def test_a_last_batch_of_one_can_be_refused_and_needs_no_choice_without_batch_norm() -> None:
    with pytest.raises(DataError, match="batch of one"):
        trained("fedavg", tiny_federation({"one": 13}), last_batch="error")
    trained("fedavg + group_norm(groups=2)", tiny_federation({"one": 13}), last_batch="error")
    with pytest.raises(SettingError, match="batches of one sample"):
        trained("fedavg", batch_size=1)


def test_a_loss_that_is_not_finite_names_client_and_round() -> None:
    with pytest.raises(NotFinite, match=r"Client big.* round 1"):
        trained("fedavg", lr=1e30, rounds=2)
    with pytest.raises(NotFinite, match=r"step \d"):
        trained("fedavg", lr=1e30, rounds=2, backend="debug")


def test_balanced_sampling_draws_the_classes_of_a_client_evenly() -> None:
    labels = torch.tensor([0] * 90 + [2] * 10)
    settings = Settings(sampling="balanced", batch_size=10, local_epochs=20)
    drawn = list(batch_indices(100, settings, True, torch.Generator().manual_seed(0), "a", labels))
    assert len(drawn) == 200 and all(len(chunk) == 10 for chunk in drawn)
    share = float((labels[torch.cat(drawn)] == 2).float().mean())
    assert abs(share - 0.5) < 0.05
    assert not (labels[torch.cat(drawn)] == 1).any()
