"""The two experiments by which FixBN takes batch norm apart. They ask why it suffers; they are not meant as methods.

``fixbn(freeze_at=1.0, stage_one="decoupled")`` (section 3.3) averages the statistics of a round first and trains the weights with that average.
``union_statistics`` (section 3.4) collects statistics anew on the union of all training data when a run has ended: it pools data, so it is
possible only where they all are in one place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyfed.client import Client
from polyfed.conversation import Payload, Replies, Talk, standard_round
from polyfed.errors import SharingError, TooFewReplies
from polyfed.layers.swap import BatchNorm
from polyfed.seeds import generator
from polyfed.server import Server, problem_with
from polyfed.sharing import Rule, bn_statistics

if TYPE_CHECKING:
    from polyfed.evaluation import Row
    from polyfed.experiment import Experiment

STATISTICS_QUESTION = "batch_norm_statistics"


def last_round(at: int | float, rounds: int) -> int:
    """The last round before something starts that was given as a round or as a share of all rounds."""
    return Rule(bn_statistics, since=at).starts_after(rounds)


def only_batch_norm_learns(model: nn.Module) -> None:
    """Let batch norms follow their inputs, and everything else predict."""
    model.eval()
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.train()


@torch.no_grad()
def measure_statistics(client: Client, payload: Payload) -> Payload:
    """This round's batches through the received model, with its weights as they are; gives the statistics they leave."""
    client.receive(payload.entries)
    only_batch_norm_learns(client.model)
    for x, _ in client.batches():
        client.model(x)
    names = [name for name in client.phase.up if bn_statistics.matches(client.bench.plan.entries[name])]
    return Payload({name: client.bench.live[name].detach().clone() for name in names})


def averaged_statistics(server: Server, replies: Replies) -> dict[str, Tensor]:
    """Reduce the clients' statistics as the plan says."""
    known = server.plan.entries
    names = [name for name in server.phase.up if bn_statistics.matches(known[name])]
    groups = {reducer: [name for name in group if name in names] for reducer, group in server.phase.groups.items()}
    foldings = {reducer: reducer.start({name: server.state[name] for name in group}) for reducer, group in groups.items() if group}
    for reply in replies:
        problem = problem_with(reply.entries, names, known)
        if problem:
            server.reject(reply.client, problem)
            continue
        for reducer, folding in foldings.items():
            folding.add({name: reply.entries[name] for name in groups[reducer]}, server.weight(reply))
    reduced = {name: value for folding in foldings.values() for name, value in folding.finish().items()}
    return {name: value.to(known[name].dtype) for name, value in reduced.items()}


@dataclass(frozen=True)
class Decoupled:
    """Until round T*: ask for statistics, average them, then let clients train with the average. After it: the usual round."""

    at: int | float
    uses = frozenset(getattr(standard_round, "uses", ()))

    def __call__(self, server: Server) -> Talk[None]:
        before = server.state
        if server.round <= last_round(self.at, server.rounds):
            replies = yield server.ask(STATISTICS_QUESTION, server.sample())
            server.state = before | averaged_statistics(server, replies)
        try:
            yield from standard_round(server)
        except TooFewReplies:
            # The round is repeated, and must start from the state it started from.
            server.state = before
            raise


@torch.no_grad()
def union_statistics(experiment: Experiment, passes: int = 1, average: str = "moving") -> dict[str, Tensor]:
    """Batch-norm statistics of the server's model, collected anew on the union of all clients' training data.

    Args:
        experiment: a run that has ended; it is left as it is.
        passes: how often all data are seen, in shuffled batches of the run's batch size.
        average: moving goes on from the averaged statistics with each layer's own momentum (the paper's Eq. 1);
            plain forgets them and takes the mean over batches.
    """
    _refuse_local_statistics(experiment)
    bench = experiment.bench
    bench.load({name: value for name, value in experiment.server.state.items() if name in bench.live})
    only_batch_norm_learns(bench.model)
    layers = [module for module in bench.model.modules() if isinstance(module, BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    if average == "plain":
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None
    try:
        for x in _union_batches(experiment, passes):
            bench.model(x.to(bench.device))
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        bench.model.eval()
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
        raise SharingError("The model has no batch-norm statistics to collect anew. Use a model with batch norm.")
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
