"""The numbers behind a diagnosis from aggregates of each client only, as a real federation can compute them.

Clients warm up with the part ``checkup`` in their method and answer its questions; the server sees their sums. What chance alone would give is
worked out, not measured on shuffled images. Of clients i with n_i images, N in all, mean m_i, variance v_i and spread s2_i of one channel:

    m = sum_i n_i m_i / N        between = sum_i n_i (m_i - m)^2 / N
    S = between + sum_i n_i s2_i / N         what single images would contribute, were they dealt at random
    V = between + sum_i n_i v_i / N          the variance of all values
    by chance, two clients lie apart by sqrt(mean over channels of S (1/n_i + 1/n_j) / V), averaged over layers

Features of one class likewise, with the variance of the class in the place of S.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from polyfed.analysis.norm_statistics import EPS, NormStatistics, Statistics
from polyfed.backends.choose import BackendFor
from polyfed.backends.in_process import InProcess
from polyfed.core.conversation import Reply
from polyfed.core.data_types import Federation
from polyfed.core.workbench import Workbench, features_or_outputs
from polyfed.diagnosis.measures import (
    Measures,
    outlines,
    shift_of_clients,
    shift_of_layers,
    skew_of_counts,
    to_the_others,
    warm_up,
)
from polyfed.diagnosis.patient import some_clients
from polyfed.errors import TooFewReplies
from polyfed.methods.checkup import BY_CLASS, STATISTICS, asked_of_all
from polyfed.runs.experiment import Experiment, already_dealt, threads
from polyfed.settings import Settings, with_changes

METHOD = "fedavg + checkup"


def to_be_looked_at(settings: Settings) -> Settings:
    """The settings with which clients, and nodes, let themselves be looked at; who takes part in a round stays as it is."""
    return with_changes(settings, {**warm_up(METHOD), "clients_per_round": settings.clients_per_round})


def measured_from_aggregates(federation: Federation, model: Any, settings: Settings, backend: BackendFor = InProcess) -> Measures:
    """Measure a federation by asking its clients for sums.

    Args:
        federation: the clients' data, or placeholders where the backend reaches nodes.
        model: a module or a function that builds one; None: what the settings name.
        settings: of the run that the doctor is asked about.
        backend: reaches the clients.
    """
    federation.task.require_class_labels("The doctor")
    few = some_clients(federation, settings.seed)
    experiment = Experiment(already_dealt(with_changes(settings, warm_up(METHOD))), few, None, model, backend=backend)
    try:
        experiment.train()
        with threads(experiment.settings.threads):
            return measured_by_asking(experiment, federation, settings)
    finally:
        experiment.backend.close()


def measured_by_asking(experiment: Experiment, federation: Federation, settings: Settings) -> Measures:
    """What the clients of a warmed-up experiment tell, as measures."""
    about_norm, by_class = {}, told(experiment, BY_CLASS, {"shape": [2, *shape_of_features(experiment.bench)]})
    if experiment.bench.batch_norms:
        about_norm = told(experiment, STATISTICS, {})
        if len(about_norm) < 2:
            raise TooFewReplies(
                f"{len(about_norm)} clients told the doctor their sums, and it compares at least two; the log says why."
            )
    domains, by_chance = domains_of(by_class)
    return Measures(
        **outlines(experiment, federation, settings),
        looked_at=len(about_norm or by_class),
        label_skew=skew_of_counts([reply.extras["labels"] for reply in by_class.values()]) if len(by_class) > 1 else math.nan,
        domains=domains,
        domains_by_chance=by_chance,
        aggregates_only=True,
        **(norm_measures(about_norm) if about_norm else {}),
    )


def told(experiment: Experiment, question: str, extras: Mapping[str, Any]) -> dict[str, Reply]:
    """What clients answer, by client in a fixed order."""
    found: dict[str, Reply] = experiment.talk(asked_of_all(experiment.server, question, extras))
    return {name: found[name] for name in sorted(found)}


@torch.no_grad()
def shape_of_features(bench: Workbench) -> tuple[int, int]:
    """Classes, and features of an image."""
    bench.model.eval()
    blank = torch.zeros(2, *bench.input_shape, device=bench.device)
    return bench.classes, features_or_outputs(bench, blank).shape[1]


# --------------------------------------------------------------------------------------------------------------- batch norm
def norm_measures(replies: Mapping[str, Reply]) -> dict[str, Any]:
    """Distances of the clients' batch-norm statistics, and what chance would give."""
    found = NormStatistics("data", {name: statistics_in(reply) for name, reply in replies.items()})
    return {
        "shift": shift_of_clients(found),
        "shift_by_layer": shift_of_layers(found),
        "shift_by_chance": shift_by_chance(
            found,
            {name: reply.extras["spread"] for name, reply in replies.items()},
            {name: reply.extras["images"] for name, reply in replies.items()},
        ),
    }


def statistics_in(reply: Reply) -> dict[str, Statistics]:
    """The statistics of each layer in an answer."""
    layers = [name.removesuffix(".running_mean") for name in reply.extras["spread"]]
    return {
        layer: Statistics(reply.entries[f"{layer}.running_mean"].float(), reply.entries[f"{layer}.running_var"].float())
        for layer in layers
    }


def shift_by_chance(found: NormStatistics, spreads: Mapping[str, Mapping[str, Tensor]], images: Mapping[str, int]) -> float:
    """How far clients would lie apart with the same images dealt at random: the formula above, averaged as the distances are."""
    owners = list(found.by_owner)
    counts = torch.tensor([images[owner] for owner in owners], dtype=torch.float64)
    shares = {}
    for layer in found.layers:
        own = [found.by_owner[owner][layer] for owner in owners]
        means, variances = torch.stack([one.mean.double() for one in own]), torch.stack([one.variance.double() for one in own])
        spread = torch.stack([spreads[owner][f"{layer}.running_mean"].double() for owner in owners])
        between = (means - weighted(means, counts)).square()
        shares[layer] = float((weighted(between + spread, counts) / (weighted(between + variances, counts) + EPS)).mean())
    pairs = {
        (one, other): statistics.fmean(math.sqrt(share * (1 / images[one] + 1 / images[other])) for share in shares.values())
        for one, other in combinations(owners, 2)
    }
    return statistics.fmean(to_the_others(pairs, owners).values())


def weighted(values: Tensor, counts: Tensor) -> Tensor:
    """The mean over the first dimension, each row counted so many times."""
    return (counts / counts.sum()) @ values


# ----------------------------------------------------------------------------------------------------------------- features
def domains_of(replies: Mapping[str, Reply]) -> tuple[float, float]:
    """Distance between two clients' mean features of one class, and what chance would give; NaN where no class can be compared."""
    if len(replies) < 2:
        return math.nan, math.nan
    counts = torch.stack([reply.extras["counts"].double() for reply in replies.values()])
    sums, squares = torch.stack([reply.extras["sums"] for reply in replies.values()], dim=1)
    spread = variance(counts.sum(), sums.sum((0, 1)), squares.sum((0, 1))).clamp_min(1e-12)
    found: list[tuple[float, float]] = []
    for label in range(counts.shape[1]):
        having = torch.nonzero(counts[:, label]).flatten().tolist()
        of_class = variance(counts[:, label].sum(), sums[:, label].sum(0), squares[:, label].sum(0))
        found += [
            apart(counts[[one, other], label], sums[[one, other], label], of_class, spread)
            for one, other in combinations(having, 2)
        ]
    if not found:
        return math.nan, math.nan
    distances, by_chance = zip(*found, strict=True)
    return statistics.fmean(distances), statistics.fmean(by_chance)


def apart(counts: Tensor, sums: Tensor, of_class: Tensor, spread: Tensor) -> tuple[float, float]:
    """How far the means of two clients lie apart, in standard deviations, and how far by chance."""
    one, other = sums / counts[:, None]
    by_chance = of_class * (1 / counts).sum()
    return float(((one - other).square() / spread).mean().sqrt()), float((by_chance / spread).mean().sqrt())


def variance(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """The variance of values from their number, sum and sum of squares."""
    return ((squares - total.square() / count) / (count - 1)).clamp_min(0)
