"""Every available data set learns with its defaults: the training loss is lower after two rounds than at the start."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.data_types import DataSet
from polyfed.errors import PolyfedError
from polyfed.runs.assemble import build_data_set
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings

METHODS = ("fedavg", "fedbn", "fedwon", "gperxan")
DATA = {
    "camvid": "camvid_192x144.tar",
    "cifar10": "cifar10_jpeg90.tar",
    "digits-five": "digits5",
    "fed-isic2019": "ham10000_64.tar",
    "office-caltech10(size=64)": "office_caltech10_128.tar",
    "pacs(size=32)": "pacs96.tar",
    "vlcs(size=32)": "vlcs_mini96.tar",
}
"""Data sets with their defaults (three with smaller images to save time), and a file of each."""
REJECTED = {("camvid", "gperxan"): "needs one class label per example"}
"""Combinations that raise an error, with a word from its message."""
RISES = {
    ("office-caltech10(size=64)", "gperxan"): "at the rate of FedWon's Table 8 the loss rises from 2.35 to 2.42; it falls at 0.001"
}
"""Combinations that do not learn with their defaults yet. Remove those that do."""
STEPS, EXAMPLES = 3, 32
"""Steps per round instead of an epoch, except on the small VLCS, and training images per client that the loss is computed on."""
NOT_DATA = {"README.md", "pacs_splits.tar.gz"}


@functools.cache
def data_set(text: str, root: Path) -> DataSet:
    return build_data_set(text, Settings(data=text, root=str(root)))


@torch.no_grad()
def training_loss(experiment: Experiment) -> float:
    """Return the mean loss over clients on fixed training images, in training mode, with the models that clients would train."""
    bench, found = experiment.bench, []
    for data in experiment.federation.clients:
        client = Client(data, bench, experiment.backend.state_of(data.id), max(1, experiment.server.round))
        client.receive(experiment.server.outgoing(data.id))
        x, y = data.train.batch(torch.linspace(0, len(data.train) - 1, EXAMPLES).long())
        torch.manual_seed(0)
        outputs = bench.model.train()(bench.preparation.for_testing(x))
        found.append(float(bench.loss(outputs, bench.task.for_loss(y))))
    return sum(found) / len(found)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("text", DATA)
def test_the_training_loss_falls_in_two_rounds(text: str, method: str, shared_data: Path, request: pytest.FixtureRequest) -> None:
    if why := RISES.get((text, method)):
        request.applymarker(pytest.mark.xfail(reason=why, raises=AssertionError, strict=True))
    if not (shared_data / DATA[text]).exists():
        pytest.skip(f"{DATA[text]} is not in {shared_data}")
    settings = Settings(data=text, method=method, rounds=2, local_steps=None if text.startswith("vlcs") else STEPS)
    if why := REJECTED.get((text, method)):
        with pytest.raises(PolyfedError, match=why):
            Experiment(settings, data_set(text, shared_data))
        return
    experiment = Experiment(settings, data_set(text, shared_data))
    start = training_loss(experiment)
    experiment.train()
    end = training_loss(experiment)
    assert math.isfinite(end) and end < start, (
        f"{start:.4f} at the start, {end:.4f} after two rounds at lr {experiment.settings.lr}"
    )


@pytest.mark.slow
def test_no_data_set_is_forgotten(shared_data: Path) -> None:
    assert {path.name for path in shared_data.iterdir()} - NOT_DATA <= set(DATA.values())
