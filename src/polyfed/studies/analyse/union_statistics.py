"""Batch-norm statistics on the union of all data (FixBN section 3.4): why averaged statistics suffer.

It pools data, so it is possible only where they all are in one place. It is an analysis, not a method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from polyfed.core.entries import estimate_statistics
from polyfed.core.evaluation import Row
from polyfed.core.seeds import generator
from polyfed.core.sharing import bn_statistics
from polyfed.errors import SharingError
from polyfed.runs.experiment import Experiment


def union_statistics(experiment: Experiment, passes: int = 1, average: str = "moving") -> dict[str, Tensor]:
    """Batch-norm statistics of the server's model, collected again on the union of all clients' training data.

    Args:
        experiment: a run that has ended; it is left as it is.
        passes: how often all data are seen, in shuffled batches of the run's batch size.
        average: moving goes on from the averaged statistics with each layer's own momentum (the paper's Eq. 1);
            plain forgets them and takes the mean over batches.
    """
    _refuse_local_statistics(experiment)
    bench = experiment.bench
    bench.load({name: value for name, value in experiment.server.state.items() if name in bench.live})
    batches = (x.to(bench.device) for x in _union_batches(experiment, passes))
    estimate_statistics(bench.model, batches, "batches" if average == "plain" else "moving")
    return {name: value.detach().clone() for name, value in bench.live.items() if bn_statistics.matches(bench.plan.entries[name])}


def score_with(experiment: Experiment, entries: Mapping[str, Tensor]) -> list[Row]:
    """Score the seen clients with some entries of the server's state replaced; the experiment is left as it is."""
    before = experiment.server.state
    experiment.server.state = before | dict(entries)
    try:
        return [row for row in experiment.evaluate() if row.view == "seen"]
    finally:
        experiment.server.state = before


def _refuse_local_statistics(experiment: Experiment) -> None:
    plan = experiment.bench.plan
    names = {name for name, entry in plan.entries.items() if bn_statistics.matches(entry)}
    if not names:
        raise SharingError("The model has no batch-norm statistics to collect again. Use a model with batch norm.")
    if names & set(plan.unsent_names):
        raise SharingError(
            f"{experiment.method} keeps batch-norm statistics at clients, so there is no average to compare with those of the union. Use fedavg."
        )


def _union_batches(experiment: Experiment, passes: int) -> Iterator[Tensor]:
    train = experiment.federation.pooled().clients[0].train
    stream = generator(experiment.settings.seed, "union statistics")
    for _ in range(passes):
        for chunk in torch.split(torch.randperm(len(train), generator=stream), experiment.settings.batch_size):
            if len(chunk) > 1:
                yield experiment.bench.preparation.for_testing(train.batch(chunk)[0])
