"""Compare batch-norm statistics between clients (FedWon Figures 1b and 12) and with those of the pooled data (FixBN section 3.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from polyfed.core.data_types import Examples
from polyfed.core.entries import estimate_statistics, layers_with_statistics
from polyfed.core.evaluation import Row
from polyfed.core.seeds import generator
from polyfed.core.sharing import bn_statistics
from polyfed.errors import ModelError, SettingError, SharingError, nearest
from polyfed.runs.experiment import Experiment, threads
from polyfed.studies.analyse.local_models import State, require_data, server_state, states_after_training, states_as_tested

SOURCES = ("data", "trained", "kept")
SERVER = "server"
EPS = 1e-5


@dataclass(frozen=True)
class Statistics:
    """Running mean and variance of one batch norm, per channel."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Distance:
    """Distance between two owners' statistics of one layer.

    With means m and variances v over channels c:

        mean      sqrt(sum_c (m_c - m'_c)^2)                                 L2, as in the papers
        variance  sqrt(sum_c (v_c - v'_c)^2)
        shift     sqrt(mean_c (m_c - m'_c)^2 / ((v_c + v'_c) / 2 + eps))     in standard deviations, comparable across layers
    """

    layer: str
    one: str
    other: str
    mean: float
    variance: float
    shift: float


@dataclass(frozen=True)
class NormStatistics:
    """Statistics by owner (a client, or ``server``) and layer, and where they come from."""

    source: str
    by_owner: Mapping[str, Mapping[str, Statistics]]

    @property
    def layers(self) -> list[str]:
        """Names of the batch norms in model order."""
        return list(next(iter(self.by_owner.values())))

    def distances(self) -> list[Distance]:
        """Return the distances of all pairs of owners per layer. The server is the second of a pair."""
        owners = sorted(self.by_owner, key=lambda owner: owner == SERVER)
        return [
            distance(layer, one, other, self.by_owner[one][layer], self.by_owner[other][layer])
            for layer in self.layers
            for one, other in combinations(owners, 2)
        ]

    def between_clients(self) -> list[Distance]:
        return [distance for distance in self.distances() if SERVER not in (distance.one, distance.other)]

    def mean_shift(self, with_server: bool = False) -> float:
        """Return the mean shift over layers and pairs of clients, or pairs of a client and the server; 0 for one client."""
        found = [one.shift for one in self.distances() if (SERVER in (one.one, one.other)) == with_server]
        return sum(found) / len(found) if found else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat mapping per owner, layer and channel."""
        return [
            {"owner": owner, "layer": layer, "channel": channel, "mean": float(mean), "variance": float(variance)}
            for owner, layers in self.by_owner.items()
            for layer, found in layers.items()
            for channel, (mean, variance) in enumerate(zip(found.mean, found.variance, strict=True))
        ]


def distance(layer: str, one: str, other: str, mine: Statistics, theirs: Statistics) -> Distance:
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
    """Return the batch-norm statistics of every client and of the server.

    Args:
        experiment: Built or trained experiment (``result.experiment``). It is not changed.
        source: ``data`` for the statistics of the client's images under the server model, ``trained`` for the running statistics
            after some steps of local training, ``kept`` for those that the client is tested with.
        images: Maximum number of images per client, for ``data``.
        states: Client models after local training, if already known, for ``trained``.
    """
    if source not in SOURCES:
        raise SettingError(f"source cannot be {source!r}. {nearest(source, SOURCES)}")
    layers = layers_with_statistics(experiment.bench.model)
    if not layers:
        raise ModelError(f"{type(experiment.bench.model).__name__} under {experiment.method} has no batch-norm statistics.")
    found: Iterable[tuple[str, State]]
    if source == "data":
        found = _states_of_data(experiment, images)
    elif source == "kept":
        found = states_as_tested(experiment)
    else:
        found = states_after_training(experiment) if states is None else states.items()
    with threads(experiment.settings.threads):
        by_owner = {owner: _statistics_in(state, layers) for owner, state in found}
        return NormStatistics(source, {**by_owner, SERVER: _statistics_in(server_state(experiment), layers)})


def _statistics_in(state: State, layers: list[str]) -> dict[str, Statistics]:
    def copy_of(name: str) -> Tensor:
        return state[name].detach().cpu().float().clone()

    return {layer: Statistics(copy_of(f"{layer}.running_mean"), copy_of(f"{layer}.running_var")) for layer in layers}


def _states_of_data(experiment: Experiment, images: int) -> Iterator[tuple[str, State]]:
    require_data(experiment)
    bench, common = experiment.bench, server_state(experiment)
    for name in experiment.server.client_ids:
        bench.load(common)
        train = experiment.backend.data[name].train
        estimate_statistics(bench.model, _training_images(experiment, name, train, images), "samples")
        yield name, {key: value.detach().clone() for key, value in bench.live.items() if "running_" in key}


def _training_images(experiment: Experiment, name: str, train: Examples, images: int) -> Iterator[Tensor]:
    stream = generator(experiment.settings.seed, "norm statistics", name)
    chosen = torch.randperm(len(train), generator=stream)[:images]
    for part in torch.split(chosen, max(2, experiment.settings.test_batch_size)):
        if len(part) > 1 or len(chosen) == 1:
            x, _ = train.batch(part)
            yield experiment.bench.preparation.for_testing(x.to(experiment.bench.device))


def union_statistics(experiment: Experiment, passes: int = 1, average: str = "moving") -> dict[str, Tensor]:
    """Re-estimate the server model's batch-norm statistics on the pooled training data of all clients (FixBN section 3.4).

    This is an analysis and not a method: it needs the data of all clients in one place.

    Args:
        experiment: Finished run. It is not changed.
        passes: Number of passes over the data, in shuffled batches of the run's batch size.
        average: ``moving`` continues from the averaged statistics with each layer's momentum (the paper's Eq. 1);
            ``plain`` discards them and takes the mean over batches.
    """
    bench, plan = experiment.bench, experiment.bench.plan
    names = {name for name, entry in plan.entries.items() if bn_statistics.matches(entry)}
    if not names:
        raise SharingError("The model has no batch-norm statistics. Use a model with batch norm.")
    if names & set(plan.unsent_names):
        raise SharingError(
            f"{experiment.method} keeps batch-norm statistics at clients, so there is no average to compare with those of the pooled "
            "data. Use fedavg."
        )
    bench.load({name: value for name, value in experiment.server.state.items() if name in bench.live})
    batches = (x.to(bench.device) for x in _pooled_batches(experiment, passes))
    estimate_statistics(bench.model, batches, "batches" if average == "plain" else "moving")
    return {name: value.detach().clone() for name, value in bench.live.items() if name in names}


def score_with(experiment: Experiment, entries: Mapping[str, Tensor]) -> list[Row]:
    """Score the seen clients with some entries of the server state replaced. The experiment is not changed."""
    before = experiment.server.state
    experiment.server.state = before | dict(entries)
    try:
        return [row for row in experiment.evaluate() if row.view == "seen"]
    finally:
        experiment.server.state = before


def _pooled_batches(experiment: Experiment, passes: int) -> Iterator[Tensor]:
    train = experiment.federation.pooled().clients[0].train
    stream = generator(experiment.settings.seed, "union statistics")
    for _ in range(passes):
        for chunk in torch.split(torch.randperm(len(train), generator=stream), experiment.settings.batch_size):
            if len(chunk) > 1:
                yield experiment.bench.preparation.for_testing(train.batch(chunk)[0])
