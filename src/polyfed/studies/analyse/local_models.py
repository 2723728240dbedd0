"""Obtain the client models as tested and after some discarded steps of local training, and measure their differences.

Averaging makes all client models of FedAvg equal, so comparisons between clients use the models after local training.
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
"""Local training steps that analyses take per client."""


def states_as_tested(experiment: Experiment) -> Iterator[tuple[str, State]]:
    """Yield every client model as it is tested: the entries from the server and those kept at the client."""
    server, bench = experiment.server, experiment.bench
    for name in server.client_ids:
        client = Client(experiment.backend.data[name], bench, experiment.backend.state_of(name), server.round)
        client.receive(server.outgoing(name))
        yield name, _copied(experiment)


def states_after_training(experiment: Experiment, steps: int = STEPS) -> Iterator[tuple[str, State]]:
    """Yield every client model after up to ``steps`` more batches of local training, before averaging."""
    require_data(experiment)
    server, bench = experiment.server, experiment.bench
    with threads(experiment.settings.threads):
        for name in server.client_ids:
            client = Client(experiment.backend.data[name], bench, experiment.backend.state_of(name), max(server.round, 1))
            with default_stream(experiment.settings.seed, "analysis", server.round, name, device=bench.device):
                extras = begin_training(client, server.training_payload(name))
                total, taken = torch.zeros((), device=bench.device), 0
                for taken, (x, y) in enumerate(islice(client.batches(), steps), 1):
                    total += client.train_on(taken - 1, x, y)
                end_training(client, extras, total, taken)
            bench.model.eval()
            yield name, _copied(experiment)


def server_state(experiment: Experiment) -> State:
    """Return the server model. Entries kept at clients are averaged, and so are the models of a method with more than one."""
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
    """Raise DataError if the experiment was opened without its data."""
    if isinstance(experiment.backend, WithoutData) or experiment.backend.remote:
        raise DataError(
            "This analysis needs the images of the run, which was opened without them. Pass the result of polyfed.run, or the "
            "run folder (polyfed analyse RUN --root DIR)."
        )


def _copied(experiment: Experiment) -> State:
    return {name: value.detach().to("cpu", copy=True) for name, value in experiment.bench.live.items()}


@dataclass(frozen=True)
class EntrySpread:
    """Spread of one state entry across clients (hFedF Figure 5).

    ``deviation`` is the standard deviation of each value across clients, averaged over the entry; ``relative`` is that number divided
    by the root mean square of the values.
    """

    entry: str
    kind: str
    values: int
    deviation: float
    relative: float


def layer_spread(experiment: Experiment, states: Iterable[tuple[str, State]] | None = None) -> list[EntrySpread]:
    """Return the spread of every entry across client models (default: as tested), without counters and running statistics."""
    if len(experiment.server.client_ids) < 2:
        raise DataError(f"The spread across clients needs two clients; the run has only {experiment.server.client_ids[0]}.")
    entries = experiment.bench.plan.entries
    names = [n for n, e in entries.items() if e.of is None and e.dtype.is_floating_point and not bn_statistics.matches(e)]
    moments = Moments()
    for _, state in states_as_tested(experiment) if states is None else states:
        moments.add({name: state[name] for name in names})
    found = []
    for name in names:
        deviations, squares, count = 0.0, 0.0, moments.mean[name].numel()
        for mean, variance in moments.in_parts(name):
            deviations += float(variance.double().sqrt().sum())
            squares += float((mean.double().square() + variance.double()).sum())
        size, deviation = math.sqrt(squares / count), deviations / count
        found.append(EntrySpread(name, entries[name].kind, count, deviation, deviation / max(size, 1e-30)))
    return found
