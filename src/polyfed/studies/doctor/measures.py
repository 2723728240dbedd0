"""The numbers behind a diagnosis, from a few training images of some clients; no test image is read.

A small federation is drawn from the whole one, so that looking takes as long for a thousand clients as for twenty. Its ``shuffled`` twin
has the same images dealt to clients of the same sizes at random: each number is set beside that of the twin, which is what chance gives.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from polyfed.backends.in_process import InProcess
from polyfed.core.data_types import ArrayExamples, ClientData, DataSet, Examples, Federation, joined
from polyfed.core.seeds import chooser, generator
from polyfed.core.workbench import features_or_outputs
from polyfed.runs.assemble import build_data_set, build_federation
from polyfed.runs.experiment import Experiment, threads, without_partition
from polyfed.settings import Settings, with_changes
from polyfed.studies.analyse.gradient_bias import gradient_bias, gradient_bias_of
from polyfed.studies.analyse.norm_statistics import SERVER, Distance, NormStatistics, norm_statistics
from polyfed.studies.sweep.data import ForbiddenExamples, trial_settings, without_tests

Notify: TypeAlias = Callable[[str], None]
"""Called with what is measured next."""
_IMAGES = 256
_CLIENTS = 20
_STEPS = 5
_ROUNDS = 3
"""Rounds of local steps before anything is measured: initial weights know nothing of the data."""
_DRAWS = 3
_LEAST_OF_A_CLASS = 4
"""Images of a class at each of two clients, for their features to be compared."""
_OTHER_NORMS = {"group norm": "fedavg + group_norm", "no norm": "fedavg + no_norm"}
_FROZEN = "frozen statistics"
_NO_CLASSES = dict.fromkeys(("label_skew", "domains", "domains_by_chance"), math.nan)
"""Where examples have no class each: masks, several labels, numbers."""


@dataclass(frozen=True)
class Measures:
    """What was measured of a federation.

    Attributes:
        clients: how many there are.
        looked_at: how many of them were looked at.
        images: training images by client, of all.
        sampled: clients that take part in a round.
        batch_size: as it was set.
        smallest_batch: the fewest images that a client's training batch may hold.
        label_skew: total variation between a client's labels and everybody's, averaged; NaN where examples have no class each.
        batch_norms: batch norms of the model.
        shift: distance of a client's batch-norm statistics to those of the others, over layers, in standard deviations.
        shift_by_chance: the same of shuffled clients, averaged.
        shift_by_layer: the mean distance between two clients, layer by layer.
        bias: bias of the averaged gradient with batch norm, as a share of the pooled gradient's length.
        bias_by_chance: the same of shuffled batches.
        other_bias: the same with other norms.
        domains: distance of clients in feature space, class by class.
        domains_by_chance: the same with the owners shuffled inside each class.
        parameters: numbers of the model.
        entries: bytes of all entries.
    """

    clients: int
    looked_at: int
    images: Mapping[str, int]
    sampled: int
    batch_size: int
    smallest_batch: int
    label_skew: float
    batch_norms: int
    parameters: int
    entries: int
    domains: float
    domains_by_chance: float
    shift: Mapping[str, float] = field(default_factory=dict)
    shift_by_chance: float = math.nan
    shift_by_layer: Mapping[str, float] = field(default_factory=dict)
    bias: float = math.nan
    bias_by_chance: float = math.nan
    other_bias: Mapping[str, float] = field(default_factory=dict)


def measured(federation: Federation, model: Any, settings: Settings, notify: Notify) -> Measures:
    """Measure a federation whose tests are out of reach."""
    few = drawn(federation, settings.seed)
    trained = _experiment(few, model, settings)
    trained.train()
    common: dict[str, Any] = {
        **_outlines(trained, federation, settings),
        "looked_at": len(few.clients),
        **(_about_classes(trained, federation, settings) if federation.task.class_labels else _NO_CLASSES),
    }
    if not trained.bench.batch_norms:
        return Measures(**common)
    notify("Comparing statistics of batch norm")
    by_client = norm_statistics(trained)
    notify("Comparing gradients with batch norm")
    bias = gradient_bias_of(trained, draws=_DRAWS)
    twin = _experiment(shuffled(few, settings.seed), model, settings)
    twin.server.state = dict(trained.server.state)
    by_chance = norm_statistics(twin)
    notify("Comparing gradients with frozen statistics")
    frozen = gradient_bias_of(trained, draws=1, fixed_statistics=True)
    kept = ("loss", "head", "init", "device", "batch_size")
    values = {name: value for name, value in vars(trained.settings).items() if name in kept}
    notify("Comparing gradients with group norm and without norms")
    others = gradient_bias(
        few, trained.settings.model if model is None else model, _OTHER_NORMS, draws=1, seed=settings.seed, **values
    )
    return Measures(
        **common,
        shift=_shift_of_clients(by_client),
        shift_by_chance=statistics.fmean(_shift_of_clients(by_chance).values()),
        shift_by_layer=_shift_of_layers(by_client),
        bias=bias.bias,
        bias_by_chance=bias.shuffled,
        other_bias={_FROZEN: frozen.bias, **{one.norm: one.bias for one in others}},
    )


def _about_classes(trained: Experiment, federation: Federation, settings: Settings) -> dict[str, float]:
    """How labels, and images of one class, differ between clients."""
    features, labels, owners = _features_of(trained)
    return {
        "label_skew": label_skew([client.train.labels for client in federation.clients], len(federation.classes)),
        "domains": class_distance(features, labels, owners),
        "domains_by_chance": class_distance(features, labels, shuffled_in_classes(labels, owners, settings.seed)),
    }


def _experiment(few: Federation, model: Any, settings: Settings) -> Experiment:
    plain = {"selection": "last", "clients_per_round": None, "backend": "process", "workers": "1", "compile": "off", "drop": 0.0}
    warm_up = {
        **plain,
        "method": "fedavg",
        "rounds": _ROUNDS,
        "total_epochs": None,
        "local_steps": _STEPS,
        "evaluate_every": 0,
    }
    return Experiment(without_partition(with_changes(settings, warm_up)), few, None, model, backend=InProcess)


def _outlines(experiment: Experiment, federation: Federation, settings: Settings) -> dict[str, Any]:
    """What needs no look at images: sizes of clients, batches and the model."""
    bench = experiment.bench
    return {
        "clients": len(federation.clients),
        "images": {client.id: len(client.train) for client in federation.clients},
        "sampled": settings.sampled(len(federation.clients)),
        "batch_size": settings.batch_size,
        "smallest_batch": min(smallest_batch(len(client.train), settings) for client in federation.clients),
        "batch_norms": len(bench.batch_norms),
        "parameters": sum(parameter.numel() for parameter in bench.model.parameters()),
        "entries": sum(value.numel() * value.element_size() for value in bench.initial.values()),
    }


def smallest_batch(images: int, settings: Settings) -> int:
    """The fewest images that a batch of a client may hold; a last batch of one is merged or dropped unless it is kept."""
    size = settings.batch_size
    if images <= size:
        return images
    last = images % size
    return size if last == 0 or (last == 1 and settings.last_batch in ("merge", "drop")) else last


def label_skew(labels: Sequence[Tensor], classes: int) -> float:
    """Total variation between each client's labels and everybody's, averaged: 0 for equal ones, towards 1 for one class each."""
    counts = torch.stack([torch.bincount(own, minlength=classes).double() for own in labels])
    shares, everybody = counts / counts.sum(1, keepdim=True), counts.sum(0) / counts.sum()
    return float((shares - everybody).abs().sum(1).mean() / 2)


def _shift_of_clients(found: NormStatistics) -> dict[str, float]:
    """How far each client's statistics lie from those of the others: the median over the others of the mean over layers."""
    pairs: dict[tuple[str, str], list[float]] = {}
    for one in _between_clients(found):
        pairs.setdefault((one.one, one.other), []).append(one.shift)
    means = {pair: statistics.fmean(values) for pair, values in pairs.items()}
    owners = [owner for owner in found.by_owner if owner != SERVER]
    return {
        owner: statistics.median([value for pair, value in means.items() if owner in pair]) if len(owners) > 1 else 0.0
        for owner in owners
    }


def _shift_of_layers(found: NormStatistics) -> dict[str, float]:
    layers: dict[str, list[float]] = {}
    for one in _between_clients(found):
        layers.setdefault(one.layer, []).append(one.shift)
    return {layer: statistics.fmean(values) for layer, values in layers.items()}


def _between_clients(found: NormStatistics) -> list[Distance]:
    """Distances of two clients, without those to the server."""
    return [one for one in found.distances() if SERVER not in (one.one, one.other)]


@torch.no_grad()
def _features_of(experiment: Experiment) -> tuple[Tensor, Tensor, Tensor]:
    """The input of the head for every image, with labels and owners; where no head is known, what the model gives."""
    bench = experiment.bench
    features, labels, owners = [], [], []
    bench.load(experiment.server.state)
    # With the running statistics of all clients: those of a client's own batch would hide how it differs.
    bench.model.eval()
    with threads(experiment.settings.threads):
        for place, client in enumerate(experiment.federation.clients):
            x, y = client.train.batch(slice(None))
            features.append(features_or_outputs(bench, bench.preparation.for_testing(x.to(bench.device))).cpu().double())
            labels.append(y)
            owners.append(torch.full((len(y),), place))
    return torch.cat(features), torch.cat(labels), torch.cat(owners)


def class_distance(features: Tensor, labels: Tensor, owners: Tensor) -> float:
    """Distance between two clients' mean features of one class, in standard deviations, over classes that both have; labels do not count."""
    spread = features.var(0).clamp_min(1e-12)
    found = []
    for label in sorted(set(labels.tolist())):
        many = Counter(owners[labels == label].tolist())
        having = [owner for owner, count in many.items() if count >= _LEAST_OF_A_CLASS]
        means = [features[(labels == label) & (owners == owner)].mean(0) for owner in having]
        found += [
            float(((one - other).square() / spread).mean().sqrt()) for place, one in enumerate(means) for other in means[:place]
        ]
    return statistics.fmean(found) if found else math.nan


def shuffled_in_classes(labels: Tensor, owners: Tensor, seed: int) -> Tensor:
    """Owners dealt at random inside each class: labels stay as skewed as they are."""
    dealt = owners.clone()
    for label in sorted(set(labels.tolist())):
        places = torch.nonzero(labels == label).squeeze(1)
        dealt[places] = owners[places][torch.randperm(len(places), generator=generator(seed, "doctor", "classes", label))]
    return dealt


def untested(data: Any, settings: Settings) -> Federation:
    """The federation, with every test set out of reach."""
    if isinstance(data, Federation):
        return _without_tests(data)
    found = data if isinstance(data, DataSet) else build_data_set(data, settings)
    return build_federation(without_tests(found), trial_settings(settings))


def _without_tests(federation: Federation) -> Federation:
    def locked(tests: Mapping[str, Examples], whose: str) -> dict[str, Examples]:
        return {domain: ForbiddenExamples(whose or domain, len(examples)) for domain, examples in tests.items()}

    clients = tuple(dataclasses.replace(client, tests=locked(client.tests, client.id)) for client in federation.clients)
    return dataclasses.replace(federation, clients=clients, unseen=locked(federation.unseen, ""))


def drawn(federation: Federation, seed: int, images: int = _IMAGES, clients: int = _CLIENTS) -> Federation:
    """Some training images of some clients, in memory; nothing to validate or test on."""
    chosen = federation.clients
    if len(chosen) > clients:
        chosen = tuple(chooser(seed, "doctor", "clients").sample(chosen, clients))
    return dataclasses.replace(federation, clients=tuple(_fewer(client, seed, images) for client in chosen), unseen={})


def _fewer(client: ClientData, seed: int, images: int) -> ClientData:
    order = torch.randperm(len(client.train), generator=generator(seed, "doctor", "images", client.id))[:images]
    x, y = client.train.batch(order)
    return ClientData(client.id, client.domains, ArrayExamples(x, y), {})


def shuffled(federation: Federation, seed: int) -> Federation:
    """The same images, dealt at random to clients of the same sizes."""
    everything = joined([client.train for client in federation.clients])
    order = torch.randperm(len(everything), generator=generator(seed, "doctor", "shuffled"))
    parts = torch.split(order, [len(client.train) for client in federation.clients])
    clients = (
        dataclasses.replace(client, train=everything.subset(part)) for client, part in zip(federation.clients, parts, strict=True)
    )
    return dataclasses.replace(federation, clients=tuple(clients))
