"""Batch-norm statistics of each client and layer, and how far they lie apart (FedWon Figures 1b and 12).

Three statistics can be meant, and ``source`` says which:

    data      those of the client's images under the server's model: how far the domains lie apart
    trained   the running statistics after some steps of local training, before they are averaged
    kept      the running statistics that the client is tested with

Distances of one layer, over its channels c:

    mean      sqrt(sum_c (m_c - m'_c)^2)                                 L2, as the papers plot it
    variance  sqrt(sum_c (v_c - v'_c)^2)
    shift     sqrt(mean_c (m_c - m'_c)^2 / ((v_c + v'_c) / 2 + eps))     in standard deviations, so layers can be compared
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from polyfed.core.data_types import Examples
from polyfed.core.entries import estimate_statistics, layers_with_statistics
from polyfed.core.seeds import generator
from polyfed.errors import ModelError, SettingError, nearest
from polyfed.runs.experiment import Experiment, threads
from polyfed.studies.analyse.local_models import State, require_data, server_state, states_after_training, states_as_tested

SOURCES = ("data", "trained", "kept")
SERVER = "server"
EPS = 1e-5


@dataclass(frozen=True)
class Statistics:
    """Running mean and variance of one batch norm, by channel."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Distance:
    """How far two owners' statistics of one layer lie apart."""

    layer: str
    one: str
    other: str
    mean: float
    variance: float
    shift: float


@dataclass(frozen=True)
class NormStatistics:
    """Statistics by owner (a client, or ``server``) and layer."""

    source: str
    by_owner: Mapping[str, Mapping[str, Statistics]]

    @property
    def layers(self) -> list[str]:
        """The batch norms, in the order of the model."""
        return list(next(iter(self.by_owner.values())))

    def distances(self) -> list[Distance]:
        """Every layer, every pair of owners; the server comes last in a pair."""
        owners = sorted(self.by_owner, key=lambda owner: owner == SERVER)
        return [
            distance(layer, one, other, self.by_owner[one][layer], self.by_owner[other][layer])
            for layer in self.layers
            for one, other in combinations(owners, 2)
        ]

    def mean_shift(self, with_server: bool = False) -> float:
        """The mean shift between two clients, or between a client and the server, over layers and pairs; 0 for one client.

        Between clients it is one number for how far the domains lie apart.
        """
        found = [one.shift for one in self.distances() if (SERVER in (one.one, one.other)) == with_server]
        return sum(found) / len(found) if found else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """One flat mapping for each owner, layer and channel."""
        return [
            {"owner": owner, "layer": layer, "channel": channel, "mean": float(mean), "variance": float(variance)}
            for owner, layers in self.by_owner.items()
            for layer, found in layers.items()
            for channel, (mean, variance) in enumerate(zip(found.mean, found.variance, strict=True))
        ]


def distance(layer: str, one: str, other: str, mine: Statistics, theirs: Statistics) -> Distance:
    """How far two statistics lie apart."""
    means = (mine.mean - theirs.mean).double()
    variances = (mine.variance - theirs.variance).double()
    pooled = (mine.variance.double() + theirs.variance.double()) / 2 + EPS
    return Distance(
        layer,
        one,
        other,
        float(means.square().sum().sqrt()),
        float(variances.square().sum().sqrt()),
        float((means.square() / pooled).mean().sqrt()),
    )


def norm_statistics(
    experiment: Experiment, source: str = "data", images: int = 256, states: Mapping[str, State] | None = None
) -> NormStatistics:
    """The batch-norm statistics of every client and of the server.

    Args:
        experiment: built or trained (``result.experiment``); it is left as it is.
        source: data, trained or kept.
        images: of each client, at most, where the source is its data.
        states: clients' models after training, where they are known already.
    """
    if source not in SOURCES:
        raise SettingError(f"source cannot be {source!r}. {nearest(source, SOURCES)}")
    layers = layers_with_statistics(experiment.bench.model)
    if not layers:
        raise ModelError(f"{type(experiment.bench.model).__name__} under {experiment.method} has no batch-norm statistics.")
    found: Iterable[tuple[str, State]]
    if source == "data":
        found = _of_data(experiment, images)
    elif source == "kept":
        found = states_as_tested(experiment)
    else:
        found = states_after_training(experiment) if states is None else states.items()
    with threads(experiment.settings.threads):
        by_owner = {owner: _read(state, layers) for owner, state in found}
        return NormStatistics(source, {**by_owner, SERVER: _read(server_state(experiment), layers)})


def _read(state: State, layers: list[str]) -> dict[str, Statistics]:
    def part(name: str) -> Tensor:
        return state[name].detach().cpu().float().clone()

    return {layer: Statistics(part(f"{layer}.running_mean"), part(f"{layer}.running_var")) for layer in layers}


def _of_data(experiment: Experiment, images: int) -> Iterator[tuple[str, State]]:
    """The statistics that each client's images have under the server's model."""
    require_data(experiment)
    bench, common = experiment.bench, server_state(experiment)
    for name in experiment.server.client_ids:
        bench.load(common)
        train = experiment.backend.data[name].train
        estimate_statistics(bench.model, _prepared(experiment, name, train, images), "samples")
        yield name, {key: value.detach().clone() for key, value in bench.live.items() if "running_" in key}


def _prepared(experiment: Experiment, name: str, train: Examples, images: int) -> Iterator[Tensor]:
    stream = generator(experiment.settings.seed, "norm statistics", name)
    chosen = torch.randperm(len(train), generator=stream)[:images]
    for part in torch.split(chosen, max(2, experiment.settings.test_batch_size)):
        if len(part) > 1 or len(chosen) == 1:
            x, _ = train.batch(part)
            yield experiment.bench.preparation.for_testing(x.to(experiment.bench.device))
