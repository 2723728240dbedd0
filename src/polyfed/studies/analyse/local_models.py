"""The models of a run's clients, as they are tested and after some steps of local training, and how much they differ.

After averaging, all clients of FedAvg have the same model, and whatever compares clients would find nothing. So analyses look at what
local training makes of the model. Those steps are thrown away: the run stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from polyfed.backends.in_process import WithoutData
from polyfed.core.client import Client, begin_training, end_training
from polyfed.core.evaluation import own_newcomer
from polyfed.core.seeds import default_stream
from polyfed.core.sharing import bn_statistics
from polyfed.errors import DataError
from polyfed.runs.callbacks.training_metrics import Moments
from polyfed.runs.experiment import Experiment, threads

State = dict[str, Tensor]
STEPS = 10
"""Steps of local training that analyses take at each client."""


def states_as_tested(experiment: Experiment) -> Iterator[tuple[str, State]]:
    """Every client's model as it is tested: what the server sends, and what the client keeps."""
    server, bench = experiment.server, experiment.bench
    for name in server.client_ids:
        client = Client(experiment.backend.data[name], bench, experiment.backend.state_of(name), server.round)
        client.receive(server.outgoing(name))
        yield name, _copied(experiment)


def states_after_training(experiment: Experiment, steps: int = STEPS) -> Iterator[tuple[str, State]]:
    """Every client's model after some more steps of its own training, before anything is averaged.

    Args:
        experiment: with its data; it is left as it is.
        steps: at most this number of batches.
    """
    require_data(experiment)
    server, bench = experiment.server, experiment.bench
    with threads(experiment.settings.threads):
        for name in server.client_ids:
            client = Client(experiment.backend.data[name], bench, experiment.backend.state_of(name), max(server.round, 1))
            with default_stream(experiment.settings.seed, "analysis", server.round, name, device=bench.device):
                extras, total, taken = (
                    begin_training(client, server.training_payload(name)),
                    torch.zeros((), device=bench.device),
                    0,
                )
                for taken, (x, y) in enumerate(islice(client.batches(), steps), 1):
                    total += client.train_on(taken - 1, x, y)
                end_training(client, extras, total, taken)
            bench.model.eval()
            yield name, _copied(experiment)


def server_state(experiment: Experiment) -> State:
    """The server's model: entries that stay at clients are averaged, and so are the models of a method that has no single one."""
    live = experiment.bench.live
    if experiment.method.newcomer is None:
        return {name: value for name, value in experiment.newcomer_state().items() if name in live}
    models = experiment.exchange(own_newcomer(experiment.server)).models
    return {name: _averaged([(weight, state[name]) for weight, state in models]) for name in live}


def _averaged(values: list[tuple[float, Tensor]]) -> Tensor:
    if not values[0][1].is_floating_point():
        return values[0][1]
    return sum((weight * value.double() for weight, value in values), torch.zeros(())).to(values[0][1].dtype)


def require_data(experiment: Experiment) -> None:
    """Refuse an experiment that was opened without its data."""
    if isinstance(experiment.backend, WithoutData) or experiment.backend.remote:
        raise DataError(
            "This analysis needs the run's own images, and the run was opened without them. Give the result of polyfed.run, or the "
            "folder of the run (polyfed analyse RUN --root DIR)."
        )


def _copied(experiment: Experiment) -> State:
    return {name: value.detach().to("cpu", copy=True) for name, value in experiment.bench.live.items()}


@dataclass(frozen=True)
class EntrySpread:
    """How much one entry of the model differs between clients (hFedF Figure 5).

    ``deviation`` is that of each value over clients, averaged over the values of the entry; ``relative`` is the same as a share of the
    root mean square of these values.
    """

    entry: str
    kind: str
    values: int
    deviation: float
    relative: float


def layer_spread(experiment: Experiment, states: Iterable[tuple[str, State]] | None = None) -> list[EntrySpread]:
    """The standard deviation across clients' models of every entry; counters and running statistics are left out.

    Args:
        experiment: a run of at least two clients.
        states: clients' models; default: those they are tested with.
    """
    if len(experiment.server.client_ids) < 2:
        raise DataError(f"The run has one client ({experiment.server.client_ids[0]}), and a deviation needs two.")
    entries = experiment.bench.plan.entries
    names = [n for n, e in entries.items() if e.of is None and e.dtype.is_floating_point and not bn_statistics.matches(e)]
    moments = Moments()
    for _, state in states_as_tested(experiment) if states is None else states:
        moments.add({name: state[name] for name in names})
    return [_spread(moments, name, entries[name].kind) for name in names]


def _spread(moments: Moments, name: str, kind: str) -> EntrySpread:
    deviations, squares, count = 0.0, 0.0, moments.mean[name].numel()
    for mean, variance in moments.in_parts(name):
        deviations += float(variance.double().sqrt().sum())
        squares += float((mean.double().square() + variance.double()).sum())
    deviation = deviations / count
    return EntrySpread(name, kind, count, deviation, deviation / max(math.sqrt(squares / count), 1e-30))
