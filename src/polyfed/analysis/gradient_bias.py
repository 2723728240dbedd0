"""What a norm does to the gradient (FixBN sections 3.2 and 3.5): local gradients against the gradient of all data in one batch.

    g_k     gradient of client k's batch, normalised by itself
    g       gradient of the union of these batches, as central training would take it
    bias    |sum_k n_k/n g_k - g| / |g|

Both start from the same weights and use the same images, so a norm that looks at one image at a time has bias 0 (up to rounding). Batch
norm has not: the gradient of an image depends on the rest of its batch. ``shuffled`` is the bias of the same images dealt to batches of
the same sizes at random. What lies between the two comes from the difference between clients; ``shuffled`` itself from the small batch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.analysis.local_models import require_data, server_state
from polyfed.core.client import Client, begin_training
from polyfed.core.conversation import Payload
from polyfed.core.data_types import Federation
from polyfed.core.method import Method
from polyfed.core.seeds import default_stream, generator
from polyfed.core.workbench import ClientState
from polyfed.runs.experiment import Experiment, threads
from polyfed.settings import Settings


@dataclass(frozen=True)
class GradientBias:
    """How far clients' gradients are from the central one, as a share of its length, averaged over draws of batches.

    Attributes:
        norm: which norm, or which run.
        bias: of the mean of the clients' gradients.
        shuffled: the same, with the images dealt to the batches at random.
        cosine: between the mean of the clients' gradients and the central one.
        layers: the bias of each layer's gradient, by the name of the layer.
        clients: the bias of each client's own part of the gradient (Eq. 4); empty where a method has a loss of its own.
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
    found = []
    for name, method in named.items():
        experiment = Experiment(Settings(batch_size=batch_size, seed=seed, **values), federation, method, model)
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
        clients=_mean_by_key([one.clients for one in drawn]),
    )


def _mean_by_key(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(one[key] for one in found) for key in found[0]}


Gradient = dict[str, Tensor]


class _Probe:
    """Takes gradients at one state, which it puts back before each."""

    def __init__(self, experiment: Experiment, state: Mapping[str, Tensor], batch_size: int, fixed: bool) -> None:
        self.experiment, self.bench, self.state = experiment, experiment.bench, state
        self.batch_size, self.fixed = batch_size, fixed
        self.data = [experiment.backend.data[name] for name in experiment.server.ids]
        self.client = self._at_work()

    def _at_work(self) -> Client:
        """A client that is about to train, in the mode that its method gives the norm."""
        server, data = self.experiment.server, self.data[0]
        client = Client(data, self.bench, ClientState(dict(self.state)), max(server.round, 1))
        begin_training(client, Payload(dict(self.state), server.message(data.id).extras))
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
        central, parts = self._central(x, y, sizes)
        local = [self._gradient(x, y) for x, y in batches]
        order = torch.randperm(len(y), generator=generator(self.experiment.settings.seed, "shuffled batches", number))
        dealt = zip(torch.split(x[order], sizes), torch.split(y[order], sizes), strict=True)
        mean, shuffled = _weighted(local, sizes), _weighted((self._gradient(*one) for one in dealt), sizes)
        clients = {data.id: _off(mine, own) for data, mine, own in zip(self.data, local, parts, strict=True)} if parts else {}
        cosine = _dot(mean, central) / max(_length(mean) * _length(central), 1e-30)
        return GradientBias("", _off(mean, central), _off(shuffled, central), cosine, _by_layer(mean, central), clients)

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

    def _central(self, x: Tensor, y: Tensor, sizes: list[int]) -> tuple[Gradient, list[Gradient]]:
        """The gradient of the union, and each client's part of it, where the loss is that of the run."""
        step = self._forward(x, y)
        if self.bench.method.task_loss is not None:
            return self._of(step.task_loss), []
        slices = zip(torch.split(step.logits, sizes), torch.split(y, sizes), strict=True)
        losses = [self.bench.loss(logits, labels) for logits, labels in slices]
        parts = [self._of(loss, keep=True) for loss in losses]
        return self._of(step.task_loss), parts

    def _of(self, loss: Tensor, keep: bool = False) -> Gradient:
        parameters = self.bench.parameters
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep, allow_unused=True)
        return {
            name: (torch.zeros_like(p) if g is None else g.detach()) for (name, p), g in zip(parameters.items(), found, strict=True)
        }


def _weighted(gradients: Iterable[Gradient], sizes: Sequence[int]) -> Gradient:
    total: Gradient = {}
    for gradient, size in zip(gradients, sizes, strict=True):
        for name, value in gradient.items():
            part = value.double() * (size / sum(sizes))
            total[name] = total[name] + part if name in total else part
    return total


def _dot(one: Gradient, other: Gradient) -> float:
    return sum(float((value.double() * other[name].double()).sum()) for name, value in one.items())


def _length(gradient: Gradient) -> float:
    return math.sqrt(_dot(gradient, gradient))


def _off(found: Gradient, expected: Gradient) -> float:
    difference = {name: value.double() - expected[name].double() for name, value in found.items()}
    return _length(difference) / max(_length(expected), 1e-30)


def _by_layer(found: Gradient, expected: Gradient) -> dict[str, float]:
    layers: dict[str, list[str]] = {}
    for name in found:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return {
        layer: _off({name: found[name] for name in names}, {name: expected[name] for name in names})
        for layer, names in layers.items()
    }
