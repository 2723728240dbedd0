"""The five seed methods in the papers' other settings: tiny batches, a tenth of many clients, skewed labels.

In each setting, every run is held to the same promises: what travels is what the plan says, all weights that it trains move, the server's
average is that of the replies, the method does what it is for, and a second run gives the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from helpers.tiny_entries import AFFINE, PLAIN, STATISTICS, under
from helpers.tiny_runs import State, built, client_of
from helpers.watching import exchanges
from polyfed.core.data_types import ArrayExamples, Federation
from polyfed.core.method import parse
from polyfed.core.rounds import Reply, Request
from polyfed.errors import SettingError
from polyfed.methods.fedwon import is_norm
from polyfed.models.layers.norms import XAN, JSBatchNorm, james_stein
from polyfed.models.layers.ws_conv import WSConv2d
from polyfed.runs.assemble import build_federation
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.testing import tiny_federation

NORMS = ("stem.1", "branch.1")
ALL_STATISTICS = {name for norm in NORMS for name in under(norm, *STATISTICS)}
ALL_AFFINE = {name for norm in NORMS for name in under(norm, *AFFINE)}
BEFORE_A_NORM = "branch.0.bias"
"""A shift that batch norm takes away again: its gradient is nothing but rounding."""


@dataclass(frozen=True)
class Run:
    """A trained experiment, its training messages, and the server's state after every round."""

    experiment: Experiment
    messages: list[tuple[int, str, State, State]]
    """Round, client, what was sent down and what came up."""
    states: dict[int, State]

    @property
    def initial(self) -> State:
        return dict(self.experiment.bench.initial)

    @property
    def digest(self) -> str:
        return Result(self.experiment, []).digest

    def sent(self, number: int) -> dict[str, State]:
        return {client: down for turn, client, down, _ in self.messages if turn == number}

    def returned(self, number: int) -> dict[str, State]:
        return {client: up for turn, client, _, up in self.messages if turn == number}


def watched(method: str, federation: Federation, **changes: Any) -> Run:
    experiment = built(method, federation, **({"lr": 0.01} | changes))
    states: dict[int, State] = {}
    seen = exchanges(experiment, [lambda server: states.__setitem__(server.round, dict(server.state))])
    del states[0]
    return Run(experiment, [message for ask, replies in seen for message in both_ways(ask, replies)], states)


def both_ways(request: Request, replies: dict[str, Reply]) -> list[tuple[int, str, State, State]]:
    assert request.what == "train" and not any(request.payloads[client].extras or reply.extras for client, reply in replies.items())
    return [
        (request.round, client, dict(request.payloads[client].entries), dict(reply.entries)) for client, reply in replies.items()
    ]


def assert_travels_as_planned(run: Run) -> None:
    for number, _, down, up in run.messages:
        phase = run.experiment.bench.plan.at(number)
        assert set(down) == set(phase.down) and set(up) == set(phase.up)


def assert_all_weights_are_trained(run: Run) -> None:
    entries = run.experiment.bench.plan.entries
    learnt = {name for name in entries if entries[name].trainable} - ({BEFORE_A_NORM} if has_norms(run) else set())
    for _, client, down, up in run.messages:
        own = run.experiment.backend.client_states[client].entries if learnt - set(up) else {}
        for name in learnt:
            after = up[name] if name in up else own[name]
            assert bool(torch.isfinite(after).all()) and not torch.equal(after, down.get(name, run.initial[name])), (client, name)


def has_norms(run: Run) -> bool:
    return any(map(is_norm, run.experiment.bench.model.modules()))


def assert_averaged_by_samples(run: Run) -> None:
    sizes = {client.id: len(client.train) for client in run.experiment.federation.clients}
    for number, state in run.states.items():
        replies = run.returned(number)
        total = sum(sizes[client] for client in replies)
        for name in next(iter(replies.values())):
            if state[name].is_floating_point():
                mean = sum(sizes[client] / total * up[name].double() for client, up in replies.items())
                torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-6)


def fedwon_has_no_norms_and_standardised_convolutions(run: Run) -> None:
    model = run.experiment.bench.model
    model.load_state_dict(run.experiment.server.state)
    assert not has_norms(run)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 2
    for layer in convolutions:
        assert isinstance(layer, WSConv2d)
        filters = layer.standardised_weight().detach().flatten(1).double()
        spread = layer.weight.detach().flatten(1).double().var(1) * filters.shape[1]
        assert bool((spread > 1e-4).all())
        torch.testing.assert_close(filters.mean(1), torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-6)
        wanted = layer.gain.detach().flatten().double().abs() * ((filters.shape[1] - 1) / filters.shape[1]) ** 0.5
        torch.testing.assert_close(filters.norm(dim=1), wanted, rtol=1e-5, atol=1e-6)
    assert_averaged_by_samples(run)


def fixbn_freezes_statistics_after_the_first_of_two_rounds(run: Run) -> None:
    first, second = run.states[1], run.states[2]
    for name in ALL_STATISTICS:
        assert not torch.equal(first[name], run.initial[name]) and torch.equal(first[name], second[name]), name
    assert all(set(up) == PLAIN for up in run.returned(1).values())
    assert all(set(up) == PLAIN - ALL_STATISTICS for up in run.returned(2).values())
    for number, by_batch in ((1, True), (2, False)):
        client = client_of(run.experiment, round_number=number)
        for hook in run.experiment.method.before_training:
            hook(client)
        assert [norm.training for norm in client.model.modules() if is_norm(norm)] == [by_batch, by_batch]
    assert_averaged_by_samples(run)


def fedstein_shrinks_statistics_and_keeps_the_affine(run: Run) -> None:
    assert all(set(down) == set(up) == PLAIN - ALL_AFFINE for _, _, down, up in run.messages)
    norms = [module for module in run.experiment.bench.model.modules() if is_norm(module)]
    assert len(norms) == 2 and all(isinstance(norm, JSBatchNorm) for norm in norms)
    own = [run.experiment.backend.client_states[client].entries["stem.1.weight"] for client in run.returned(2)]
    assert not any(torch.equal(own[0], other) for other in own[1:])
    model = run.experiment.bench.model.eval()
    model.load_state_dict(
        run.experiment.server.state | dict(run.experiment.backend.client_states[next(iter(run.returned(2)))].entries)
    )
    x = torch.rand(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    norm = model.stem[1]  # type: ignore[index]
    means = {True: x.mean((0, 2, 3)), False: norm.running_mean}
    variances = {True: x.var((0, 2, 3), correction=0), False: norm.running_var}
    for training in (False, True):
        mean, variance = james_stein(means[training]), james_stein(variances[training])
        assert not torch.equal(mean, means[training])
        expected = nn.functional.batch_norm(x, mean, variance, norm.weight, norm.bias, eps=norm.eps)
        torch.testing.assert_close(norm.train(training)(x), expected, rtol=1e-4, atol=1e-5)
    assert_averaged_by_samples(run)


def gperxan_keeps_the_batch_side_and_is_guided(run: Run) -> None:
    model = run.experiment.bench.model
    assert [path for path, module in model.named_modules() if isinstance(module, XAN)] == list(NORMS)
    batch_side = {name for name in model.state_dict() if "batch_side" in name or "score_bn" in name}
    assert len(batch_side) == 12
    assert all(not batch_side & set(down) and batch_side <= set(up) for _, _, down, up in run.messages)
    assert all(bool(run.states[2][f"{norm}.score_in"] != run.initial[f"{norm}.score_in"]) for norm in NORMS)
    assert_averaged_by_samples(run)
    settings = run.experiment.settings
    changes = {key: getattr(settings, key) for key in ("batch_size", "clients_per_round", "local_steps")}
    unguided = watched("perxan", run.experiment.federation, **changes)
    assert not torch.equal(unguided.states[2]["stem.0.weight"], run.states[2]["stem.0.weight"])
    assert torch.equal(unguided.initial["stem.0.weight"], run.initial["stem.0.weight"])


def hypernetworks_make_every_client_its_own_weights_and_learn(run: Run) -> None:
    assert all(set(down) == set(up) == PLAIN - ALL_STATISTICS for _, _, down, up in run.messages)
    for number in (1, 2):
        heads = [down["head.weight"] for down in run.sent(number).values()]
        assert not any(torch.equal(heads[0], other) for other in heads[1:])
    before, after = run.sent(1), {client: run.experiment.server.outgoing(client) for client in run.sent(1)}
    assert not any(torch.equal(down["head.weight"], after[client]["head.weight"]) for client, down in before.items())
    for client in run.returned(2):
        assert set(run.experiment.backend.client_states[client].entries) == ALL_STATISTICS


EFFECTS: dict[str, Callable[[Run], None]] = {
    "fedwon": fedwon_has_no_norms_and_standardised_convolutions,
    "fixbn": fixbn_freezes_statistics_after_the_first_of_two_rounds,
    "fedstein": fedstein_shrinks_statistics_and_keeps_the_affine,
    "gperxan": gperxan_keeps_the_batch_side_and_is_guided,
    "hfedf": hypernetworks_make_every_client_its_own_weights_and_learn,
    "pfedhn": hypernetworks_make_every_client_its_own_weights_and_learn,
}


def assert_keeps_its_promises(method: str, run: Run) -> None:
    assert_travels_as_planned(run)
    assert_all_weights_are_trained(run)
    EFFECTS[method](run)


def assert_scored(experiment: Experiment, domains: int) -> None:
    rows = [row for row in experiment.evaluate() if row.view == "seen"]
    assert len({row.domain for row in rows}) == domains
    assert all(0 <= row.numbers["accuracy"] <= 1 for row in rows)
    assert all(bool(torch.isfinite(value).all()) for value in experiment.server.state.values())


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("method", EFFECTS)
def test_tiny_batches(method: str, batch: int) -> None:
    smallest = parse(method).facts.smallest_batch or 2
    if batch == 1 and smallest > 1:
        with pytest.raises(SettingError, match="batches of one sample"):
            watched(method, tiny_federation(), batch_size=batch)
        return
    run = watched(method, tiny_federation(), batch_size=batch)
    assert_keeps_its_promises(method, run)
    assert watched(method, tiny_federation(), batch_size=batch).digest == run.digest
    assert watched(method, tiny_federation(), batch_size=batch, seed=1).digest != run.digest
    assert_scored(run.experiment, domains=3)


def many_clients(count: int) -> Federation:
    """Clients of two to four images, each of its own brightness."""
    federation = tiny_federation({f"client{number:04}": 2 + number % 3 for number in range(count)})
    stream = torch.Generator().manual_seed(0)
    clients = []
    for number, client in enumerate(federation.clients):
        x = torch.randint(0, 120 + 30 * (number % 5), (len(client.train), 3, 8, 8), dtype=torch.uint8, generator=stream)
        clients.append(dataclasses.replace(client, train=ArrayExamples(x, client.train.labels)))
    return dataclasses.replace(federation, clients=tuple(clients))


@pytest.mark.parametrize(("clients", "sampled"), [(100, 10), pytest.param(1000, 100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", EFFECTS)
def test_a_tenth_of_many_clients(method: str, clients: int, sampled: int) -> None:
    federation = many_clients(clients)
    changes = {"batch_size": 2, "clients_per_round": sampled, "local_steps": 1}
    run = watched(method, federation, **changes)
    assert_keeps_its_promises(method, run)
    asked = [set(run.sent(number)) for number in (1, 2)]
    assert [len(some) for some in asked] == [sampled, sampled] and asked[0] != asked[1]
    keepers = set(run.experiment.backend.client_states)
    assert keepers == (asked[0] | asked[1] if run.experiment.bench.plan.has_local_entries else set()), (
        "only who took part keeps something"
    )
    assert run.experiment.costs.messages["training"] == 2 * sampled
    if clients == 100:
        assert watched(method, federation, **changes).digest == run.digest


@pytest.mark.parametrize("method", EFFECTS)
def test_skewed_labels(method: str) -> None:
    stream = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    x = torch.rand(90, 3, 8, 8, generator=stream) + torch.nn.functional.one_hot(y, 3).float()[:, :, None, None]
    settings = Settings(partition="dirichlet(clients=5, alpha=0.5, minimum=2)")
    federation = build_federation({"only": ((x, y), (x[:9], y[:9]))}, settings)
    shares = torch.stack([torch.bincount(client.train.labels, minlength=3) for client in federation.clients]).double()
    assert (shares / shares.sum(1, keepdim=True)).std(0).max() > 0.1, "labels are skewed"
    run = watched(method, federation, batch_size=4)
    assert_keeps_its_promises(method, run)
    assert watched(method, federation, batch_size=4).digest == run.digest
    assert_scored(run.experiment, domains=1)
