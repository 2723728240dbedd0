"""Measure the gradient bias of a norm: local gradients compared with the gradient of the pooled batch (FixBN sections 3.2 and 3.5).

    g_k     gradient of client k's batch, normalised with the statistics of that batch
    g       gradient of all these batches in one, as in central training
    bias    |sum_k n_k/n g_k - g| / |g|

Both use the same weights and images, so a norm that treats each image separately has bias 0 up to rounding. With batch norm, the gradient
of an image depends on the rest of its batch. ``shuffled`` is the bias of the same images, randomly assigned to batches of the same sizes.
It comes from the batch size; the remaining bias comes from the differences between clients.

The pooled batch passes through the model at once. If that would take more than ``MEMORY``, batches are reduced, and then the clients.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client, begin_training
from polyfed.core.data_types import Federation
from polyfed.core.method import Method
from polyfed.core.rounds import Payload
from polyfed.core.seeds import default_stream, generator
from polyfed.core.workbench import ClientState
from polyfed.runs.experiment import Experiment, code_of, threads
from polyfed.settings import Settings
from polyfed.studies.analyse.local_models import require_data, server_state

MEMORY = 2 << 30
"""Limit in bytes for the activations of the pooled batch."""
MIN_IMAGES = 4
"""Smallest batch per client before clients are omitted to save memory."""


@dataclass(frozen=True)
class GradientBias:
    """Distance of the client gradients from the central one, relative to its length, averaged over draws of batches.

    Attributes:
        bias: Bias of the mean client gradient.
        shuffled: Bias if the same images are randomly assigned to the batches.
        cosine: Cosine between the mean client gradient and the central one.
        layers: Bias of each layer's gradient.
        clients: Bias of each client's part of the gradient (Eq. 4) in the first draw. Empty if the method has a custom loss, or if the
            statistics are fixed, because images then do not affect each other.
    """

    norm: str
    bias: float
    shuffled: float
    cosine: float
    layers: Mapping[str, float]
    clients: Mapping[str, float]


def gradient_bias(
    federation: Federation,
    model: Any,
    norms: Mapping[str, str | Method] | Sequence[str],
    *,
    batch_size: int = 32,
    draws: int = 4,
    seed: int = 0,
    **settings: Any,
) -> list[GradientBias]:
    """Return the gradient bias of each norm on this federation at the model's initial weights, without training.

    Args:
        federation: Federation that provides the images.
        model: As for ``polyfed.run``: a name, a module, or a function that builds one.
        norms: Methods that set the norm, or a mapping from labels to methods (``{"group norm": "fedavg + group_norm"}``).
        batch_size: Images per client in a batch.
        draws: Number of batches to average over.
        seed: Seed of the weights and the batches.
        settings: Other fields of ``polyfed.Settings``.

    Example:
        ``gradient_bias(federation, "resnet20", ["fedavg", "fedavg + group_norm(groups=2)"])[0].bias``
    """
    named = norms if isinstance(norms, Mapping) else {text: text for text in norms}
    values = {"rounds": 1, "threads": 1} | settings
    if isinstance(model, str):
        values["model"] = model
    chosen = Settings(batch_size=batch_size, seed=seed, **values).trusted()  # a model passed in Python is trusted
    chosen = dataclasses.replace(chosen, trust=chosen.trust.adding(code_of(federation)))
    found = []
    for name, method in named.items():
        experiment = Experiment(chosen, federation, method, model)
        found.append(gradient_bias_of(experiment, norm=name, batch_size=batch_size, draws=draws))
    return found


def gradient_bias_of(
    experiment: Experiment, *, norm: str = "", batch_size: int | None = None, draws: int = 4, fixed_statistics: bool = False
) -> GradientBias:
    """Return the gradient bias of one experiment at its current weights.

    Args:
        experiment: Built or trained experiment. It is not changed.
        norm: Label. Default: its method.
        batch_size: Images per client in a batch. Default: as in training.
        draws: Number of batches to average over.
        fixed_statistics: Normalise with the running statistics, as FixBN does after its freeze.
    """
    bench = experiment.bench
    with threads(experiment.settings.threads):
        require_data(experiment)
        probe = _Probe(experiment, server_state(experiment), batch_size or experiment.settings.batch_size, fixed_statistics)
        drawn = [probe.draw(number) for number in range(draws)]
    bench.model.eval()
    return GradientBias(
        norm or str(experiment.method),
        bias=statistics.fmean(one.bias for one in drawn),
        shuffled=statistics.fmean(one.shuffled for one in drawn),
        cosine=statistics.fmean(one.cosine for one in drawn),
        layers={layer: statistics.fmean(one.layers[layer] for one in drawn) for layer in drawn[0].layers},
        clients=drawn[0].clients,
    )


Gradient = dict[str, Tensor]


class _Probe:
    """Gradients at one state, which is restored before each of them."""

    def __init__(self, experiment: Experiment, state: Mapping[str, Tensor], batch_size: int, fixed: bool) -> None:
        self.experiment, self.bench, self.state = experiment, experiment.bench, state
        self.batch_size, self.fixed = batch_size, fixed
        self.data = [experiment.backend.data[name] for name in experiment.server.client_ids]
        self.client = self._training_client()
        self._fit_memory()

    def _fit_memory(self) -> None:
        """Reduce the images per client, and then the clients, until the pooled batch fits into memory."""
        images = max(MEMORY // self._bytes_per_image(), 2)
        smallest = min(MIN_IMAGES, self.batch_size)
        if images < smallest * len(self.data):
            self.data = self.data[: max(images // smallest, 2)]
        self.batch_size = min(self.batch_size, max(images // len(self.data), 2))

    def _bytes_per_image(self) -> int:
        """Return the memory for the activations of one image."""
        x, y = (each[:2] for each in self._batch(0, 0))
        kept = {parameter.data_ptr(): 0 for parameter in self.bench.parameters.values()}

        def keep(value: Tensor) -> Tensor:
            kept.setdefault(value.data_ptr(), value.numel() * value.element_size())
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            step = self._forward(x, y)
        del step
        return max(sum(kept.values()) // len(x), 1)

    def _training_client(self) -> Client:
        """Return a client ready to train, with its norms in the mode that the method sets."""
        server, data = self.experiment.server, self.data[0]
        client = Client(data, self.bench, ClientState(dict(self.state)), max(server.round, 1))
        begin_training(client, Payload(dict(self.state), server.training_payload(data.id).extras))
        for module in self.bench.model.modules():
            random = isinstance(module, nn.modules.dropout._DropoutNd)
            if random or (self.fixed and module in self.bench.batch_norms):
                module.eval()
        return client

    def draw(self, number: int) -> GradientBias:
        batches = [self._batch(number, place) for place in range(len(self.data))]
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        sizes = [len(y) for _, y in batches]
        local = [self._gradient(x, y) for x, y in batches]
        central, clients = self._central(x, y, sizes, local if number == 0 and not self.fixed else [])
        order = torch.randperm(len(y), generator=generator(self.experiment.settings.seed, "shuffled batches", number))
        random_batches = zip(torch.split(x[order], sizes), torch.split(y[order], sizes), strict=True)
        found = _compare(_weighted_mean(local, sizes), central)
        local.clear()
        shuffled = _compare(_weighted_mean((self._gradient(*batch) for batch in random_batches), sizes), central)
        return GradientBias("", _bias(found), _bias(shuffled), _cosine(found), _by_layer(found), clients)

    def _batch(self, number: int, place: int) -> tuple[Tensor, Tensor]:
        data = self.data[place]
        stream = generator(self.experiment.settings.seed, "gradient bias", number, data.id)
        chosen = torch.randperm(len(data.train), generator=stream)[: self.batch_size]
        x, y = data.train.batch(chosen)
        prepared = self.bench.preparation.for_testing(x.to(self.bench.device))
        return prepared, self.bench.task.for_loss(y.to(self.bench.device))

    def _forward(self, x: Tensor, y: Tensor) -> Any:
        self.bench.load(self.state)
        with default_stream(self.experiment.settings.seed, "gradient bias", device=self.bench.device):
            return self.client.forward(0, x, y)

    def _gradient(self, x: Tensor, y: Tensor) -> Gradient:
        return self._backward(self._forward(x, y).task_loss)

    def _central(self, x: Tensor, y: Tensor, sizes: list[int], local: Sequence[Gradient]) -> tuple[Gradient, dict[str, float]]:
        """Return the gradient of the pooled batch, and the bias of each local gradient if the method has no custom loss."""
        step, clients = self._forward(x, y), dict[str, float]()
        if local and self.bench.method.task_loss is None:
            slices = zip(torch.split(step.logits, sizes), torch.split(y, sizes), strict=True)
            losses = [self.bench.loss(logits, labels) for logits, labels in slices]
            for data, mine, loss in zip(self.data, local, losses, strict=True):
                clients[data.id] = _bias(_compare(mine, self._backward(loss, keep=True)))
        return self._backward(step.task_loss), clients

    def _backward(self, loss: Tensor, keep: bool = False) -> Gradient:
        parameters = self.bench.parameters
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep, allow_unused=True)
        return {
            name: (torch.zeros_like(p) if g is None else g.detach()) for (name, p), g in zip(parameters.items(), found, strict=True)
        }


CHUNK = 1 << 18
"""Number of values converted to double precision at a time: copies of whole gradients would cost more than the sums."""


@dataclass(frozen=True)
class _Sums:
    """Squared lengths over one entry (of the difference, the found and the expected gradient), and the inner product."""

    difference: float
    found: float
    expected: float
    product: float


def _weighted_mean(gradients: Iterable[Gradient], sizes: Sequence[int]) -> Gradient:
    """Return the mean gradient weighted by size, in double precision."""
    total: Gradient = {}
    for gradient, size in zip(gradients, sizes, strict=True):
        for name, value in gradient.items():
            if name not in total:
                total[name] = torch.zeros_like(value, dtype=torch.float64, memory_format=torch.contiguous_format)
            for mean, part in _chunks(total[name], value):
                mean.add_(part.double(), alpha=size / sum(sizes))
    return total


def _chunks(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(one.flatten(), CHUNK), torch.split(other.flatten(), CHUNK), strict=True)


def _compare(found: Gradient, expected: Gradient) -> dict[str, _Sums]:
    return {name: _sums(value, expected[name]) for name, value in found.items()}


def _sums(found: Tensor, expected: Tensor) -> _Sums:
    totals = [0.0, 0.0, 0.0, 0.0]
    for mine, theirs in _chunks(found, expected):
        one, other = mine.double(), theirs.double()
        off = one - other
        for place, (left, right) in enumerate([(off, off), (one, one), (other, other), (one, other)]):
            totals[place] += float(left.dot(right))
    return _Sums(*totals)


def _bias(sums: Mapping[str, _Sums]) -> float:
    """Return the length of the difference relative to the expected length."""
    difference, expected = sum(one.difference for one in sums.values()), sum(one.expected for one in sums.values())
    return math.sqrt(difference) / max(math.sqrt(expected), 1e-30)


def _cosine(sums: Mapping[str, _Sums]) -> float:
    found, expected = sum(one.found for one in sums.values()), sum(one.expected for one in sums.values())
    return sum(one.product for one in sums.values()) / max(math.sqrt(found) * math.sqrt(expected), 1e-30)


def _by_layer(sums: Mapping[str, _Sums]) -> dict[str, float]:
    layers: dict[str, dict[str, _Sums]] = {}
    for name, one in sums.items():
        layers.setdefault(name.rpartition(".")[0] or name, {})[name] = one
    return {layer: _bias(entries) for layer, entries in layers.items()}
