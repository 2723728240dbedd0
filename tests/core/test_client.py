"""Local work: steps, last batches, losses that are not finite, training that diverges, and labels that are no class."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import pytest
import torch

from helpers import tiny_runs
from polyfed import Method, run
from polyfed.core.client import batch_indices
from polyfed.core.data_types import ArrayExamples
from polyfed.errors import DataError, NotFinite, PolyfedError, SettingError
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation

trained = functools.partial(tiny_runs.trained, rounds=3)


def test_local_work_in_steps() -> None:
    experiment = trained("fedavg", rounds=1, local_steps=7)
    assert experiment.server.state["stem.1.num_batches_tracked"] == 7


@pytest.mark.parametrize(("policy", "batches"), [("merge", 3), ("drop", 3), ("keep", 4)])
def test_a_last_batch_of_one_follows_the_stated_choice(policy: str, batches: int) -> None:
    experiment = trained("fedavg", tiny_federation({"one": 13}), rounds=1, last_batch=policy)
    assert experiment.server.state["stem.1.num_batches_tracked"] == batches


def test_a_last_batch_of_one_can_be_refused_and_needs_no_choice_without_batch_norm() -> None:
    with pytest.raises(DataError, match="last batch has one sample"):
        trained("fedavg", tiny_federation({"one": 13}), last_batch="error")
    trained("fedavg + group_norm(groups=2)", tiny_federation({"one": 13}), last_batch="error")
    with pytest.raises(SettingError, match="batches of one sample"):
        trained("fedavg", batch_size=1)


def test_a_loss_that_is_not_finite_names_client_and_round() -> None:
    with pytest.raises(NotFinite, match=r"Diverged in round 1 at client big"):
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


def explode(step: Any) -> None:
    """Make the last step of a round one too many, as a large learning rate does."""
    for parameter in step.client.bench.model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(torch.inf)


def test_divergence_is_said_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "polyfed")
    with pytest.raises(PolyfedError, match=r"(?i)diverged.*learning rate"):
        run(tiny_federation(), Method("explode", gradients=(explode,)), TinyNet, rounds=3, local_steps=1, batch_size=8)
    assert not any("repeated" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("label", [-1, 1000])
def test_a_label_that_is_no_class_is_refused_with_its_client(label: int) -> None:
    federation = tiny_federation()
    first = federation.clients[0]
    x, y = first.train.batch(slice(None))
    y = torch.cat([y[:-1], torch.tensor([label])])
    broken = dataclasses.replace(
        federation, clients=(dataclasses.replace(first, train=ArrayExamples(x, y)), *federation.clients[1:])
    )
    with pytest.raises(DataError, match=f"{first.id}.*{label}"):
        run(broken, "fedavg", TinyNet, rounds=1)
