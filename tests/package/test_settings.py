"""Schedules and budgets."""

from __future__ import annotations

import pytest

from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.testing import TinyNet, tiny_federation


def test_schedule_and_budget() -> None:
    settings = Settings(lr=1.0, rounds=4, schedule="cosine")
    assert [settings.lr_at(r) for r in (1, 3)] == pytest.approx([1.0, 0.5])
    assert [Settings(lr=1.0, rounds=4, schedule="steps(at=(0.5,), factor=0.1)").lr_at(r) for r in (2, 3)] == pytest.approx(
        [1.0, 0.1]
    )
    # FixBN: 128 epochs of 26 samples in steps of batch 4 at three clients: R = 128 * 26 / (2 * 4 * 3)
    experiment = Experiment(Settings(total_epochs=128, local_steps=2, batch_size=4), tiny_federation(), model=TinyNet())
    assert experiment.settings.rounds == round(128 * 26 / 24)
