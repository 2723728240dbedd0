"""What a trained run tells about who was trained on: membership inference, by client and domain.

    loss:   a sample is said to be a member where the model's loss on it is small (Yeom et al., 2018)
    lira:   log N(c; m + g, s) - log N(c; m, s), c = log(p_y / (1 - p_y)), m by sample over shadow runs (Carlini et al., 2022)

A shadow run trains the same method on a random half of each client's training samples and as many test samples, so on about as many as the run;
runs come in pairs, the second on the other halves, so every sample is in half of them. Shadow runs are few, so all samples share the spread s,
and g, what membership adds, is drawn towards its mean over samples as far as it is uncertain (James and Stein).

Every number is a lower bound: an attack that fails here says nothing about a better one. References: Yeom et al., Privacy Risk in Machine
Learning, CSF 2018; Carlini et al., Membership Inference Attacks From First Principles, S&P 2022.
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
    """One client's samples: the score of each under every attack, the larger the more likely a member."""

    client: str
    domains: tuple[str, ...]
    members: Mapping[str, Tensor]
    others: Mapping[str, Tensor]


def membership(
    experiment: Experiment,
    shadows: int = 0,
    maximum: int = 1000,
    model: Any = None,
    notify: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Attack a run that has ended, client by client.

    Args:
        experiment: the run, with its own data.
        shadows: shadow runs for lira, an even number; each costs as much as the run. 0: only the loss.
        maximum: members, and others, of a client that are attacked at most.
        model: the model for shadow runs, where the run was started from Python with one.
        notify: called with a sentence before each shadow run.
    """
    if shadows < 0 or shadows % 2:
        raise SettingError(f"shadows={shadows}: shadow runs come in pairs. Use an even number, or 0 for none.")
    experiment.federation.task.require_class_labels("Membership inference")
    pools = {client.id: pool_of(client, maximum, experiment.settings.seed) for client in experiment.federation.clients}
    target = confidences(experiment, {name: pool.examples for name, pool in pools.items()})
    inside, scored = shadow_runs(experiment, pools, shadows, model, notify)
    attacked = []
    for client in experiment.federation.clients:
        pool, own = pools[client.id], target[client.id]
        scores = {"loss": own}
        if shadows:
            ratios = [(inside[k][client.id], scored[k][client.id]) for k in range(shadows)]
            scores["lira"] = likelihood_ratio(own, torch.stack([i for i, _ in ratios]), torch.stack([c for _, c in ratios]))
        parts = ({name: value[: pool.members] for name, value in scores.items()}, {n: v[pool.members :] for n, v in scores.items()})
        attacked.append(Attacked(client.id, client.domains, *parts))
    return summary(attacked, shadows)


@dataclass(frozen=True)
class Pool:
    """Samples of a client that are attacked: members first, then as many that were not trained on.

    ``whole`` are its training samples and at most as many test samples, ``places`` where the attacked ones are among them.
    """

    examples: Examples
    members: int
    whole: Examples
    places: Tensor


def pool_of(client: ClientData, maximum: int, seed: int) -> Pool:
    """Some training samples of a client, and some test samples of its own domains."""
    tests = [examples for domain, examples in client.tests.items() if domain in client.domains]
    if not tests or not sum(map(len, tests)):
        raise DataError(
            f"Client {client.id} has no test samples of its own domains to tell members from. Use a run with tests at clients."
        )
    rest = joined(tests) if len(tests) > 1 else tests[0]
    count = min(maximum, len(client.train), len(rest))
    stream = generator(seed, "leakage", client.id)
    orders = [torch.randperm(len(part), generator=stream) for part in (client.train, rest)]
    chosen = [order[:count] for order in orders]
    attacked = joined([part.subset(places) for part, places in zip((client.train, rest), chosen, strict=True)])
    # No more others than members: a shadow run must train on about as many samples as the run did.
    whole = joined([client.train, rest.subset(orders[1][: len(client.train)])])
    return Pool(attacked, count, whole, torch.cat([chosen[0], len(client.train) + torch.arange(count)]))


@torch.no_grad()
def confidences(experiment: Experiment, pools: Mapping[str, Examples]) -> dict[str, Tensor]:
    """log(p_y / (1 - p_y)) of each sample under its client's own model; it falls with the loss."""
    bench, server, found = experiment.bench, experiment.server, {}
    for client in experiment.federation.clients:
        at_work = Client(client, bench, experiment.backend.state_of(client.id), server.round)
        at_work.receive(server.outgoing(client.id))
        bench.model.eval()
        parts = []
        for x, y in in_batches(pools[client.id], bench.settings.test_batch_size):
            chances = predicted(bench, bench.preparation.for_testing(sent_to(x, bench.device))).to(CPU).double()
            right = chances.gather(1, y[:, None]).squeeze(1)
            wrong = chances.scatter(1, y[:, None], 0.0).sum(1)
            parts.append(right.clamp_min(1e-30).log() - wrong.clamp_min(1e-30).log())
        found[client.id] = torch.cat(parts)
    return found


def shadow_runs(
    experiment: Experiment, pools: Mapping[str, Pool], shadows: int, model: Any, notify: Callable[[str], None]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Train shadow runs; gives who of the attacked samples was in each, and the confidence on them."""
    inside: list[dict[str, Tensor]] = []
    members: dict[str, Tensor] = {}
    scored: list[dict[str, Tensor]] = []
    for number in range(shadows):
        notify(f"Shadow run {number + 1} of {shadows}: {experiment.method}, {experiment.settings.rounds} rounds.")
        if number % 2:
            members = {name: ~before for name, before in members.items()}
        else:
            seed = experiment.settings.seed
            members = {name: half(len(pool.whole), generator(seed, "shadow", number, name)) for name, pool in pools.items()}
        shadow = shadow_of(experiment, pools, members, number, model)
        try:
            shadow.train()
            scored.append(confidences(shadow, {name: pool.examples for name, pool in pools.items()}))
        finally:
            shadow.backend.close()
        inside.append({name: members[name][pool.places] for name, pool in pools.items()})
    return inside, scored


def half(count: int, stream: torch.Generator) -> Tensor:
    """A random half."""
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.randperm(count, generator=stream)[: (count + 1) // 2]] = True
    return chosen


def shadow_of(
    experiment: Experiment, pools: Mapping[str, Pool], members: Mapping[str, Tensor], number: int, model: Any
) -> Experiment:
    """The same run on other data, from another seed."""
    clients = tuple(
        dataclasses.replace(
            client, train=pools[client.id].whole.subset(torch.nonzero(members[client.id]).flatten()), validation=None
        )
        for client in experiment.federation.clients
    )
    federation: Federation = dataclasses.replace(experiment.federation, clients=clients)
    seed = derive(experiment.settings.seed, "shadow", number) % 2**31
    settings = dataclasses.replace(
        without_partition(experiment.settings), seed=seed, selection="last", evaluate_every=0, backend="process"
    )
    return Experiment(settings, federation, model=model, recorded=RecordedInputs.of(federation))


def likelihood_ratio(own: Tensor, inside: Tensor, shadows: Tensor) -> Tensor:
    """How much likelier a sample's confidence is for a member, from shadow runs (rows) with and without it."""
    with_it, without = mean_over(shadows, inside), mean_over(shadows, ~inside)
    variance = variance_around(shadows, torch.where(inside, with_it, without))
    gain = shrunken(
        with_it - without, float((variance * (1 / inside.sum(0).clamp_min(1) + 1 / (~inside).sum(0).clamp_min(1))).mean())
    )
    outside = (shadows - gain * inside).mean(0)
    return gain * (own - outside - gain / 2) / variance


def shrunken(gains: Tensor, noise: float) -> Tensor:
    """What membership adds to each sample's confidence, drawn towards the mean of all as far as few shadow runs make it uncertain."""
    spread = float(gains.var()) if len(gains) > 1 else 0.0
    trust = max(0.0, 1 - noise / spread) if spread > 0 else 0.0
    return gains.mean() + trust * (gains - gains.mean())


def mean_over(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of each column over chosen rows."""
    return (values * chosen).sum(0) / chosen.sum(0).clamp_min(1)


def variance_around(values: Tensor, means: Tensor) -> Tensor:
    """One variance for all samples; from one shadow run of each kind it is that of all values."""
    free = values.numel() - 2 * values.shape[1]
    squares = (values - means).square().sum()
    return (squares / free if free > 0 and float(squares) > 0 else values.var()).clamp_min(1e-12)


def summary(attacked: Sequence[Attacked], shadows: int) -> dict[str, Any]:
    """Numbers by client, by domain and in all."""
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
    """Area under the curve, and the share of members that are found at 1 % false positives, for each attack."""
    found: dict[str, Any] = {}
    for attack in ATTACKS:
        if attack in attacked[0].members:
            members, others = (torch.cat([getattr(each, side)[attack] for each in attacked]) for side in ("members", "others"))
            found |= {"members": len(members), "others": len(others)}
            found[attack] = {"auc": area(members, others), "tpr_at_1_percent_fpr": found_at(members, others, FALSE_POSITIVES)}
    return found


def area(members: Tensor, others: Tensor) -> float:
    """The chance that a member has a larger score than somebody else; ties count half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, members, right=False) + torch.searchsorted(ordered, members, right=True)
    return float(below.double().mean() / 2 / len(others))


def found_at(members: Tensor, others: Tensor, share: float) -> float:
    """The share of members above a threshold that at most this share of the others exceeds."""
    allowed = math.floor(share * len(others))
    threshold = others.sort(descending=True).values[allowed] if allowed < len(others) else others.min()
    return float((members > threshold).double().mean())
