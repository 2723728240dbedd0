"""Run membership inference attacks on a trained run, per client and domain.

    loss:   predict "member" if the model's loss on a sample is small (Yeom et al., 2018)
    lira:   log N(c; m + g, s) - log N(c; m, s), c = log(p_y / (1 - p_y)), m per sample over shadow runs (Carlini et al., 2022)

A shadow run trains the same method on a random half of the union of each client's training samples and as many test
samples, that is, on about as much data as the run. Shadow runs come in pairs with complementary halves, so each sample is in half of them. They are few, so all samples
share the spread s, and the gain g of membership is shrunk towards its mean over samples in proportion to its noise (James and Stein).

All numbers are lower bounds: a stronger attack may succeed where these fail. References: Yeom et al., Privacy Risk in Machine Learning, CSF
2018; Carlini et al., Membership Inference Attacks From First Principles, S&P 2022.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client, predicted
from polyfed.core.data_types import ClientData, Examples, Federation, in_batches, joined
from polyfed.core.seeds import derive, generator
from polyfed.core.workbench import CPU, sent_to
from polyfed.data.federation_summary import RecordedInputs
from polyfed.errors import DataError, SettingError
from polyfed.runs.experiment import Experiment, without_partition

FALSE_POSITIVES = 0.01
ATTACKS = ("loss", "lira")


@dataclass(frozen=True)
class Attacked:
    """The scores of a client's samples under every attack, those of members first; a larger score means a more likely member."""

    client: str
    domains: tuple[str, ...]
    members: int
    scores: Mapping[str, Tensor]


def membership(
    experiment: Experiment, shadows: int = 0, maximum: int = 1000, model: Any = None, notify: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Attack a finished run, client by client.

    Args:
        experiment: The run with its data.
        shadows: Number of shadow runs for lira, which must be even. Each costs as much as the run. 0 runs only the loss attack.
        maximum: Maximum number of members, and of other samples, to attack per client.
        model: Model for the shadow runs, if the run was started from Python with a model.
        notify: Called with a message before each shadow run.
    """
    if shadows < 0 or shadows % 2:
        raise SettingError(f"shadows must be an even number of 0 or more, because shadow runs come in pairs; got {shadows}.")
    experiment.federation.task.require_class_labels("Membership inference")
    pools = {client.id: pool_of(client, maximum, experiment.settings.seed) for client in experiment.federation.clients}
    target = confidences(experiment, {name: pool.examples for name, pool in pools.items()})
    inside, scored = shadow_runs(experiment, pools, shadows, model, notify)
    attacked = []
    for client in experiment.federation.clients:
        pool, own = pools[client.id], target[client.id]
        scores = {"loss": own}
        if shadows:
            scores["lira"] = likelihood_ratio(own, *(torch.stack([run[client.id] for run in runs]) for runs in (inside, scored)))
        attacked.append(Attacked(client.id, client.domains, pool.members, scores))
    return summary(attacked, shadows)


@dataclass(frozen=True)
class Pool:
    """The attacked samples of a client: members, then the same number of others.

    ``whole`` holds its training samples and at most as many test samples; ``places`` are the positions of the attacked samples in ``whole``.
    """

    examples: Examples
    members: int
    whole: Examples
    places: Tensor


def pool_of(client: ClientData, maximum: int, seed: int) -> Pool:
    """Return some training samples of a client and some test samples of its domains."""
    tests = [examples for domain, examples in client.tests.items() if domain in client.domains]
    if not tests or not sum(map(len, tests)):
        raise DataError(
            f"Client {client.id} has no test samples of its domains to compare members with. Use a run with tests at clients."
        )
    rest = joined(tests) if len(tests) > 1 else tests[0]
    count = min(maximum, len(client.train), len(rest))
    stream = generator(seed, "leakage", client.id)
    orders = [torch.randperm(len(part), generator=stream) for part in (client.train, rest)]
    chosen = [order[:count] for order in orders]
    attacked = joined([part.subset(places) for part, places in zip((client.train, rest), chosen, strict=True)])
    # At most as many non-members as members, so that a shadow run trains on about as many samples as the run.
    whole = joined([client.train, rest.subset(orders[1][: len(client.train)])])
    return Pool(attacked, count, whole, torch.cat([chosen[0], len(client.train) + torch.arange(count)]))


@torch.no_grad()
def confidences(experiment: Experiment, pools: Mapping[str, Examples]) -> dict[str, Tensor]:
    """Return log(p_y / (1 - p_y)) of each sample under its client's model."""
    bench, server, found = experiment.bench, experiment.server, {}
    for client in experiment.federation.clients:
        Client(client, bench, experiment.backend.state_of(client.id), server.round).receive(server.outgoing(client.id))
        bench.model.eval()
        parts = []
        for x, y in in_batches(pools[client.id], bench.settings.test_batch_size):
            probabilities = predicted(bench, bench.preparation.for_testing(sent_to(x, bench.device))).to(CPU).double()
            right = probabilities.gather(1, y[:, None]).squeeze(1)
            wrong = probabilities.scatter(1, y[:, None], 0.0).sum(1)
            parts.append(right.clamp_min(1e-30).log() - wrong.clamp_min(1e-30).log())
        found[client.id] = torch.cat(parts)
    return found


def shadow_runs(
    experiment: Experiment, pools: Mapping[str, Pool], shadows: int, model: Any, notify: Callable[[str], None]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Train shadow runs; return for each which attacked samples were members, and the confidences."""
    inside: list[dict[str, Tensor]] = []
    members: dict[str, Tensor] = {}
    scored: list[dict[str, Tensor]] = []
    for number in range(shadows):
        notify(f"Shadow run {number + 1} of {shadows}: {experiment.method}, {experiment.settings.rounds} rounds.")
        if number % 2:
            members = {name: ~others for name, others in members.items()}
        else:
            members = {}
            for name, pool in pools.items():
                order = torch.randperm(len(pool.whole), generator=generator(experiment.settings.seed, "shadow", number, name))
                members[name] = torch.zeros(len(order), dtype=torch.bool)
                members[name][order[: (len(order) + 1) // 2]] = True
        shadow = shadow_of(experiment, pools, members, number, model)
        try:
            shadow.train()
            scored.append(confidences(shadow, {name: pool.examples for name, pool in pools.items()}))
        finally:
            shadow.backend.close()
        inside.append({name: members[name][pool.places] for name, pool in pools.items()})
    return inside, scored


def shadow_of(
    experiment: Experiment, pools: Mapping[str, Pool], members: Mapping[str, Tensor], number: int, model: Any
) -> Experiment:
    """Return the same run on the given members, with another seed."""
    clients = []
    for client in experiment.federation.clients:
        train = pools[client.id].whole.subset(torch.nonzero(members[client.id]).flatten())
        clients.append(dataclasses.replace(client, train=train, validation=None))
    federation: Federation = dataclasses.replace(experiment.federation, clients=tuple(clients))
    plain: dict[str, Any] = {
        "seed": derive(experiment.settings.seed, "shadow", number) % 2**31,
        "selection": "last",
        "evaluate_every": 0,
    }
    settings = dataclasses.replace(without_partition(experiment.settings), **plain, backend="process")
    return Experiment(settings, federation, model=model, recorded=RecordedInputs.of(federation))


def likelihood_ratio(own: Tensor, inside: Tensor, shadows: Tensor) -> Tensor:
    """Return the log-likelihood ratio of membership per sample, from shadow runs (rows) with and without the sample."""
    with_it, without = mean_over(shadows, inside), mean_over(shadows, ~inside)
    variance = variance_around(shadows, torch.where(inside, with_it, without))
    noise = variance * (1 / inside.sum(0).clamp_min(1) + 1 / (~inside).sum(0).clamp_min(1))
    gain = shrink(with_it - without, float(noise.mean()))
    outside = (shadows - gain * inside).mean(0)
    return gain * (own - outside - gain / 2) / variance


def shrink(gains: Tensor, noise: float) -> Tensor:
    """Shrink the gains in confidence towards their mean, in proportion to their noise."""
    spread = float(gains.var()) if len(gains) > 1 else 0.0
    trust = max(0.0, 1 - noise / spread) if spread > 0 else 0.0
    return gains.mean() + trust * (gains - gains.mean())


def mean_over(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum(0) / chosen.sum(0).clamp_min(1)


def variance_around(values: Tensor, means: Tensor) -> Tensor:
    """Return one variance for all samples; with a single pair of shadow runs, the variance of all values."""
    free = values.numel() - 2 * values.shape[1]
    squares = (values - means).square().sum()
    return (squares / free if free > 0 and float(squares) > 0 else values.var()).clamp_min(1e-12)


def summary(attacked: Sequence[Attacked], shadows: int) -> dict[str, Any]:
    domains = sorted({"+".join(each.domains) for each in attacked})
    groups = {domain: [each for each in attacked if "+".join(each.domains) == domain] for domain in domains}
    return {
        "lower_bounds": True,
        "false_positives": FALSE_POSITIVES,
        "shadow_runs": shadows,
        "clients": {each.client: numbers([each]) for each in attacked},
        "domains": {domain: numbers(group) for domain, group in groups.items()},
        "all": numbers(attacked),
    }


def numbers(attacked: Sequence[Attacked]) -> dict[str, Any]:
    """Return, for each attack, the AUC and the true-positive rate at 1 % false positives."""
    found: dict[str, Any] = {}
    for attack in ATTACKS:
        if attack in attacked[0].scores:
            members = torch.cat([each.scores[attack][: each.members] for each in attacked])
            others = torch.cat([each.scores[attack][each.members :] for each in attacked])
            found |= {"members": len(members), "others": len(others)}
            rate = true_positive_rate(members, others, FALSE_POSITIVES)
            found[attack] = {"auc": area(members, others), "tpr_at_1_percent_fpr": rate}
    return found


def area(members: Tensor, others: Tensor) -> float:
    """Return the probability that a member scores higher than another sample; ties count half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, members, right=False) + torch.searchsorted(ordered, members, right=True)
    return float(below.double().mean() / 2 / len(others))


def true_positive_rate(members: Tensor, others: Tensor, false_positives: float) -> float:
    """Return the fraction of members above the threshold that at most this fraction of the others exceeds."""
    allowed = math.floor(false_positives * len(others))
    threshold = others.sort(descending=True).values[allowed] if allowed < len(others) else others.min()
    return float((members > threshold).double().mean())
