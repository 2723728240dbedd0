"""What a run's models say of images, by a client's own model or by the newcomer's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyfed.core import evaluation
from polyfed.core.client import Client
from polyfed.core.client import predicted as predicted_by
from polyfed.core.data_types import ArrayExamples
from polyfed.core.device import CPU
from polyfed.errors import DataError

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


def predicted(experiment: Experiment, images: Tensor, client: str | None = None, newcomer: str | None = None) -> Tensor:
    """What is predicted for each image: probabilities, shape (n, classes), or what the task has."""
    from polyfed.runs.experiment import threads

    bench = experiment.bench
    batches = evaluation.inputs_of(bench, ArrayExamples(images, torch.zeros(len(images))))
    with threads(experiment.settings.threads), torch.no_grad():
        found = []
        for weight, load in models_for(experiment, client, newcomer or experiment.settings.newcomer, batches):
            load()
            bench.model.eval()
            found.append(weight * torch.cat([predicted_by(bench, x).to(CPU) for x in batches()]))
    return functools.reduce(torch.add, found)


def client_words(known: Iterable[str], most: int = 12) -> str:
    """The clients there are, in a sentence; many are not all named.

    >>> client_words(["pen", "photo"])
    'The clients are: pen, photo.'
    """
    names = list(known)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"The clients are: {', '.join(names[:most])}{more}."


def models_for(
    experiment: Experiment, client: str | None, newcomer: str, batches: Callable[[], Iterator[Tensor]]
) -> list[tuple[float, Any]]:
    """Weights, and functions that put each model on the bench."""
    server, bench, backend = experiment.server, experiment.bench, experiment.backend
    if client is None:
        made = experiment.talk(evaluation.newcomer(server, bench, newcomer, batches))
        whole = sum(weight for weight, _ in made.models)
        states = [(weight / whole, {n: v for n, v in state.items() if n in bench.live}) for weight, state in made.models]
        return [(weight, lambda state=state: bench.load(state)) for weight, state in states]
    if client not in backend.data:
        raise DataError(f"There is no client {client!r}. {client_words(backend.data)}")
    for prepare in experiment.method.before_evaluation:
        experiment.talk(prepare(server))
    at_work = Client(backend.data[client], bench, backend.state_of(client), server.round)
    return [(1.0, lambda: at_work.receive(server.outgoing(client)))]
