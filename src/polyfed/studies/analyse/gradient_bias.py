"""What a norm does to the gradient (FixBN sections 3.2 and 3.5): local gradients against the gradient of all data in one batch.

    g_k     gradient of client k's batch, normalised by itself
    g       gradient of the union of these batches, as central training would take it
    bias    |sum_k n_k/n g_k - g| / |g|

Both start from the same weights and use the same images, so a norm that looks at one image at a time has bias 0 (up to rounding). Batch
norm has not: the gradient of an image depends on the rest of its batch. ``shuffled`` is the bias of the same images dealt to batches of
the same sizes at random. What lies between the two comes from the difference between clients; ``shuffled`` itself from the small batch.

The union goes through the model in one piece, so batches are smaller, and at last clients fewer, where it would take more than ``MEMORY``.
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
"""Bytes that a model may keep of the union of all batches until its gradient is taken."""
LEAST = 4
"""Images of a client in a batch, before clients are left out for want of memory."""


@dataclass(frozen=True)
class GradientBias:
    """How far clients' gradients are from the central one, as a share of its length, averaged over draws of batches.

    Attributes:
        norm: which norm, or which run.
        bias: of the mean of the clients' gradients.
        shuffled: the same, with the images dealt to the batches at random.
        cosine: between the mean of the clients' gradients and the central one.
        layers: the bias of each layer's gradient, by the name of the layer.
        clients: the bias of each client's own part of the gradient (Eq. 4), in the first draw; empty where a method has a loss of its
            own, and where statistics are fixed by request, since images then do not affect each other.
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
    """The bias of each norm on this federation, at the model's initial weights; nothing is trained.

    Args:
        federation: whose images are used.
        model: as for ``polyfed.run``: a name, a module, or a function that builds one.
        norms: methods that decide the norm, or their names with the method of each (``{"group norm": "fedavg + group_norm"}``).
        batch_size: images of each client in a batch.
        draws: batches drawn; numbers are their mean.
        seed: of the weights and the batches.
        settings: any other field of ``polyfed.Settings``.

    Example:
        ``gradient_bias(federation, "resnet20", ["fedavg", "fedavg + group_norm(groups=2)"])[0].bias``
    """
    named = norms if isinstance(norms, Mapping) else {text: text for text in norms}
    values = {"rounds": 1, "threads": 1} | settings
    if isinstance(model, str):
        values["model"] = model
    chosen = Settings(batch_size=batch_size, seed=seed, **values).trusted()  # naming a model in Python is asking for it
    chosen = dataclasses.replace(chosen, trust=chosen.trust.adding(code_of(federation)))
    found = []
    for name, method in named.items():
        experiment = Experiment(chosen, federation, method, model)
        found.append(gradient_bias_of(experiment, norm=name, batch_size=batch_size, draws=draws))
    return found


def gradient_bias_of(
    experiment: Experiment, *, norm: str = "", batch_size: int | None = None, draws: int = 4, fixed_statistics: bool = False
) -> GradientBias:
    """The bias of one experiment, at the weights it has now; it is left as it is.

    Args:
        experiment: built, or trained.
        norm: what it is called; default: its method.
        batch_size: images of each client in a batch; default: as in training.
        draws: batches drawn.
        fixed_statistics: batch norm normalises with its running statistics, as FixBN does after its freeze.
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
        layers=_mean_by_key([one.layers for one in drawn]),
        clients=drawn[0].clients,
    )


def _mean_by_key(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(one[key] for one in found) for key in found[0]}


Gradient = dict[str, Tensor]


class _Probe:
    """Takes gradients at one state, which it puts back before each."""

    def __init__(self, experiment: Experiment, state: Mapping[str, Tensor], batch_size: int, fixed: bool) -> None:
        self.experiment, self.bench, self.state = experiment, experiment.bench, state
        self.batch_size, self.fixed = batch_size, fixed
        self.data = [experiment.backend.data[name] for name in experiment.server.client_ids]
        self.client = self._at_work()
        self._fit_memory()

    def _fit_memory(self) -> None:
        """Take fewer images of each client, and at last fewer clients, where the union would not fit."""
        images = max(MEMORY // self._bytes_of_an_image(), 2)
        least = min(LEAST, self.batch_size)
        if images < least * len(self.data):
            self.data = self.data[: max(images // least, 2)]
        self.batch_size = min(self.batch_size, max(images // len(self.data), 2))

    def _bytes_of_an_image(self) -> int:
        """What the model keeps of one image for its gradient, its own parameters aside."""
        x, y = (each[:2] for each in self._batch(0, 0))
        kept = {parameter.data_ptr(): 0 for parameter in self.bench.parameters.values()}

        def keep(value: Tensor) -> Tensor:
            kept.setdefault(value.data_ptr(), value.numel() * value.element_size())
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            step = self._forward(x, y)
        del step
        return max(sum(kept.values()) // len(x), 1)

    def _at_work(self) -> Client:
        """A client that is about to train, in the mode that its method gives the norm."""
        server, data = self.experiment.server, self.data[0]
        client = Client(data, self.bench, ClientState(dict(self.state)), max(server.round, 1))
        begin_training(client, Payload(dict(self.state), server.training_payload(data.id).extras))
        for module in self.bench.model.modules():
            random = isinstance(module, nn.modules.dropout._DropoutNd)
            if random or (self.fixed and module in self.bench.batch_norms):
                module.eval()
        return client

    def draw(self, number: int) -> GradientBias:
        """Everything that is known from one batch of each client."""
        batches = [self._batch(number, place) for place in range(len(self.data))]
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        sizes = [len(y) for _, y in batches]
        local = [self._gradient(x, y) for x, y in batches]
        central, clients = self._central(x, y, sizes, local if number == 0 and not self.fixed else [])
        order = torch.randperm(len(y), generator=generator(self.experiment.settings.seed, "shuffled batches", number))
        dealt = zip(torch.split(x[order], sizes), torch.split(y[order], sizes), strict=True)
        found = _compared(_weighted(local, sizes), central)
        local.clear()
        shuffled = _compared(_weighted((self._gradient(*one) for one in dealt), sizes), central)
        return GradientBias("", _off(found), _off(shuffled), _cosine(found), _by_layer(found), clients)

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
        return self._of(self._forward(x, y).task_loss)

    def _central(self, x: Tensor, y: Tensor, sizes: list[int], local: Sequence[Gradient]) -> tuple[Gradient, dict[str, float]]:
        """The gradient of the union, and how far each of the local ones is from its part of it, where the loss is that of the run."""
        step, clients = self._forward(x, y), dict[str, float]()
        if local and self.bench.method.task_loss is None:
            slices = zip(torch.split(step.logits, sizes), torch.split(y, sizes), strict=True)
            losses = [self.bench.loss(logits, labels) for logits, labels in slices]
            for data, mine, loss in zip(self.data, local, losses, strict=True):
                clients[data.id] = _off(_compared(mine, self._of(loss, keep=True)))
        return self._of(step.task_loss), clients

    def _of(self, loss: Tensor, keep: bool = False) -> Gradient:
        parameters = self.bench.parameters
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep, allow_unused=True)
        return {
            name: (torch.zeros_like(p) if g is None else g.detach()) for (name, p), g in zip(parameters.items(), found, strict=True)
        }


CHUNK = 1 << 18
"""Values that are taken to double precision at a time: copies of whole gradients would cost more time and memory than the sums."""


@dataclass(frozen=True)
class _Sums:
    """Sums over the values of one entry: of the gradient found, the one expected, and both."""

    difference: float
    found: float
    expected: float
    product: float


def _weighted(gradients: Iterable[Gradient], sizes: Sequence[int]) -> Gradient:
    """The mean of gradients, weighted by size, in double precision."""
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


def _compared(found: Gradient, expected: Gradient) -> dict[str, _Sums]:
    """The sums that every number is made of, by entry."""
    return {name: _sums(value, expected[name]) for name, value in found.items()}


def _sums(found: Tensor, expected: Tensor) -> _Sums:
    totals = [0.0, 0.0, 0.0, 0.0]
    for mine, theirs in _chunks(found, expected):
        one, other = mine.double(), theirs.double()
        off = one - other
        for place, (left, right) in enumerate([(off, off), (one, one), (other, other), (one, other)]):
            totals[place] += float(left.dot(right))
    return _Sums(*totals)


def _off(sums: Mapping[str, _Sums]) -> float:
    """The length of the difference as a share of the expected length."""
    difference, expected = sum(one.difference for one in sums.values()), sum(one.expected for one in sums.values())
    return math.sqrt(difference) / max(math.sqrt(expected), 1e-30)


def _cosine(sums: Mapping[str, _Sums]) -> float:
    found, expected = sum(one.found for one in sums.values()), sum(one.expected for one in sums.values())
    return sum(one.product for one in sums.values()) / max(math.sqrt(found) * math.sqrt(expected), 1e-30)


def _by_layer(sums: Mapping[str, _Sums]) -> dict[str, float]:
    layers: dict[str, dict[str, _Sums]] = {}
    for name, one in sums.items():
        layers.setdefault(name.rpartition(".")[0] or name, {})[name] = one
    return {layer: _off(entries) for layer, entries in layers.items()}
