"""Measure a federation on a few training images of some clients, without reading any test image.

The measurements use a small federation drawn from the whole one, so a thousand clients take as long as twenty. Each number is compared
with the same number by chance, after ``shuffle`` has assigned the same images to clients of the same sizes at random.
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
"""Called with a message before each measurement."""
_IMAGES = 256
_CLIENTS = 20
_STEPS = 5
_ROUNDS = 3
"""Rounds of local steps before the measurements, because initial weights do not depend on the data."""
_DRAWS = 3
_MIN_PER_CLASS = 4
"""Minimum number of images of a class at each of two clients to compare their features."""
_OTHER_NORMS = {"group norm": "fedavg + group_norm", "no norm": "fedavg + no_norm"}
_FROZEN = "frozen statistics"
_NO_CLASSES = dict.fromkeys(("label_skew", "domains", "domains_by_chance"), math.nan)
"""For tasks without class labels: segmentation, multi-label classification, regression."""


@dataclass(frozen=True)
class Measures:
    """Measurements of a federation.

    Attributes:
        looked_at: Number of clients that were examined.
        sampled: Number of clients per round.
        label_skew: Mean total variation between a client's labels and the labels of all clients; NaN without class labels.
        entries: Bytes of all state entries.
        domains: Distance between clients in feature space, compared within classes.
        domains_by_chance: The same with the owners shuffled within each class.
        shift: Distance of each client's batch-norm statistics to those of the others, over layers, in standard deviations.
        shift_by_chance: The same for shuffled clients, averaged.
        shift_by_layer: Mean distance between two clients per layer.
        bias: Bias of the averaged gradient with batch norm, relative to the length of the pooled gradient.
        bias_by_chance: The same for shuffled batches.
        other_bias: The same with other norms.
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


def measure(federation: Federation, model: Any, settings: Settings, notify: Notify) -> Measures:
    few = draw(federation, settings.seed)
    trained = _experiment(few, model, settings)
    trained.train()
    common: dict[str, Any] = {
        **_measure_sizes(trained, federation, settings),
        "looked_at": len(few.clients),
        **(_measure_classes(trained, federation, settings) if federation.task.class_labels else _NO_CLASSES),
    }
    if not trained.bench.batch_norms:
        return Measures(**common)
    notify("Comparing batch-norm statistics")
    by_client = norm_statistics(trained)
    notify("Comparing gradients with batch norm")
    bias = gradient_bias_of(trained, draws=_DRAWS)
    twin = _experiment(shuffle(few, settings.seed), model, settings)
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
        shift_by_layer=_mean_shift(by_client, lambda distance: distance.layer),
        bias=bias.bias,
        bias_by_chance=bias.shuffled,
        other_bias={_FROZEN: frozen.bias, **{one.norm: one.bias for one in others}},
    )


def _measure_classes(trained: Experiment, federation: Federation, settings: Settings) -> dict[str, float]:
    features, labels, owners = _features_of(trained)
    return {
        "label_skew": label_skew([client.train.labels for client in federation.clients], len(federation.classes)),
        "domains": class_distance(features, labels, owners),
        "domains_by_chance": class_distance(features, labels, shuffle_in_classes(labels, owners, settings.seed)),
    }


def _experiment(few: Federation, model: Any, settings: Settings) -> Experiment:
    plain = {"selection": "last", "clients_per_round": None, "backend": "process", "workers": "1", "compile": "off", "drop": 0.0}
    warm_up = {**plain, "method": "fedavg", "rounds": _ROUNDS, "total_epochs": None, "local_steps": _STEPS, "evaluate_every": 0}
    return Experiment(without_partition(with_changes(settings, warm_up)), few, None, model, backend=InProcess)


def _measure_sizes(experiment: Experiment, federation: Federation, settings: Settings) -> dict[str, Any]:
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
    """Return the smallest batch of a client; a last batch of one image is merged or dropped unless the settings keep it."""
    size = settings.batch_size
    if images <= size:
        return images
    last = images % size
    return size if last == 0 or (last == 1 and settings.last_batch in ("merge", "drop")) else last


def label_skew(labels: Sequence[Tensor], classes: int) -> float:
    """Return the mean total variation between each client's labels and the labels of all clients, from 0 (equal) towards 1."""
    counts = torch.stack([torch.bincount(own, minlength=classes).double() for own in labels])
    per_client, overall = counts / counts.sum(1, keepdim=True), counts.sum(0) / counts.sum()
    return float((per_client - overall).abs().sum(1).mean() / 2)


def _shift_of_clients(found: NormStatistics) -> dict[str, float]:
    """Return each client's distance to the others: the median over the others of the mean over layers."""
    means = _mean_shift(found, lambda distance: (distance.one, distance.other))
    owners = [owner for owner in found.by_owner if owner != SERVER]
    return {
        owner: statistics.median([value for pair, value in means.items() if owner in pair]) if len(owners) > 1 else 0.0
        for owner in owners
    }


def _mean_shift(found: NormStatistics, key: Callable[[Distance], Any]) -> dict[Any, float]:
    """Return the mean shift between two clients, grouped by a key."""
    groups: dict[Any, list[float]] = {}
    for distance in found.between_clients():
        groups.setdefault(key(distance), []).append(distance.shift)
    return {group: statistics.fmean(shifts) for group, shifts in groups.items()}


@torch.no_grad()
def _features_of(experiment: Experiment) -> tuple[Tensor, Tensor, Tensor]:
    """Return the head's input (or the model's output if no head is known) for every image, with labels and owners."""
    bench = experiment.bench
    features, labels, owners = [], [], []
    bench.load(experiment.server.state)
    # Evaluation mode uses the averaged running statistics; batch statistics would hide how a client differs.
    bench.model.eval()
    with threads(experiment.settings.threads):
        for place, client in enumerate(experiment.federation.clients):
            x, y = client.train.batch(slice(None))
            features.append(features_or_outputs(bench, bench.preparation.for_testing(x.to(bench.device))).cpu().double())
            labels.append(y)
            owners.append(torch.full((len(y),), place))
    return torch.cat(features), torch.cat(labels), torch.cat(owners)


def class_distance(features: Tensor, labels: Tensor, owners: Tensor) -> float:
    """Return the mean distance between two clients' mean features of the same class, in standard deviations, over shared classes."""
    spread = features.var(0).clamp_min(1e-12)
    found = []
    for label in sorted(set(labels.tolist())):
        counts = Counter(owners[labels == label].tolist())
        eligible = [owner for owner, count in counts.items() if count >= _MIN_PER_CLASS]
        means = [features[(labels == label) & (owners == owner)].mean(0) for owner in eligible]
        found += [
            float(((one - other).square() / spread).mean().sqrt()) for place, one in enumerate(means) for other in means[:place]
        ]
    return statistics.fmean(found) if found else math.nan


def shuffle_in_classes(labels: Tensor, owners: Tensor, seed: int) -> Tensor:
    """Shuffle the owners within each class, which keeps the label skew."""
    shuffled = owners.clone()
    for label in sorted(set(labels.tolist())):
        places = torch.nonzero(labels == label).squeeze(1)
        shuffled[places] = owners[places][torch.randperm(len(places), generator=generator(seed, "doctor", "classes", label))]
    return shuffled


def federation_without_tests(data: Any, settings: Settings) -> Federation:
    """Return the federation with test sets that cannot be read."""
    if not isinstance(data, Federation):
        found = data if isinstance(data, DataSet) else build_data_set(data, settings)
        return build_federation(without_tests(found), trial_settings(settings))

    def lock(tests: Mapping[str, Examples], owner: str) -> dict[str, Examples]:
        return {domain: ForbiddenExamples(owner or domain, len(examples)) for domain, examples in tests.items()}

    clients = tuple(dataclasses.replace(client, tests=lock(client.tests, client.id)) for client in data.clients)
    return dataclasses.replace(data, clients=clients, unseen=lock(data.unseen, ""))


def draw(federation: Federation, seed: int, images: int = _IMAGES, clients: int = _CLIENTS) -> Federation:
    """Load a random sample of clients and of their training images into memory, without validation or test data."""
    chosen = federation.clients
    if len(chosen) > clients:
        chosen = tuple(chooser(seed, "doctor", "clients").sample(chosen, clients))
    return dataclasses.replace(federation, clients=tuple(_fewer(client, seed, images) for client in chosen), unseen={})


def _fewer(client: ClientData, seed: int, images: int) -> ClientData:
    order = torch.randperm(len(client.train), generator=generator(seed, "doctor", "images", client.id))[:images]
    x, y = client.train.batch(order)
    return ClientData(client.id, client.domains, ArrayExamples(x, y), {})


def shuffle(federation: Federation, seed: int) -> Federation:
    """Assign the same images to clients of the same sizes at random."""
    pooled = joined([client.train for client in federation.clients])
    order = torch.randperm(len(pooled), generator=generator(seed, "doctor", "shuffled"))
    parts = torch.split(order, [len(client.train) for client in federation.clients])
    clients = (
        dataclasses.replace(client, train=pooled.subset(part)) for client, part in zip(federation.clients, parts, strict=True)
    )
    return dataclasses.replace(federation, clients=tuple(clients))
