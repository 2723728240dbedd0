"""The doctor from sums of each client only: the same advice, chance as shuffled images would give it, and nothing of a test set."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import polyfed as package
from helpers.command_line import Command
from helpers.handwriting import federation
from polyfed.analysis.norm_statistics import NormStatistics, Statistics, norm_statistics
from polyfed.core.conversation import Ask, Payload, Reply
from polyfed.core.data_types import Federation
from polyfed.diagnosis.advice import FINE
from polyfed.diagnosis.aggregates import METHOD, domains_of, measured_from_aggregates, shape_of_features, shift_by_chance
from polyfed.diagnosis.examine import Diagnosis
from polyfed.diagnosis.measures import class_distance, on_other_data, shift_of_clients, shuffled_in_classes, warmed_up
from polyfed.diagnosis.patient import drawn, shuffled, untested
from polyfed.errors import TooFewReplies
from polyfed.methods.checkup import BY_CLASS, FEWEST, STATISTICS
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings

MODEL = "small_cnn(width=8)"
SETTINGS = Settings(model=MODEL)


@functools.cache
def diagnosis(inverted: int | None) -> Diagnosis:
    return package.doctor(federation(inverted), MODEL, aggregates_only=True)


def test_identical_clients_are_told_that_batch_norm_is_fine() -> None:
    found = diagnosis(None)
    assert found.advice.verdict == FINE and found.apart == [] and not any(one.is_large for one in found.findings)


def test_the_client_with_inverted_colours_is_named() -> None:
    found = diagnosis(2)
    assert found.apart == ["c2"] and found.advice.method == "fedbn"


def test_what_pools_images_is_left_out_by_name_and_the_rest_is_there() -> None:
    told = diagnosis(2).as_json()
    names = [one["name"] for one in told["findings"]]
    assert names == ["statistics", "label skew", "domains", "smallest batch", "sampling", "model"]
    assert told["aggregates_only"] and told["left_out"] == {"gradient bias": "needs a simulation: it pools images"}
    assert all(one["computed_by"] == "simulation or real federation" for one in told["findings"])
    assert "left out: needs a simulation" in repr(diagnosis(2)) and told["cost"]["cpu_seconds"] > 0


def by_shuffling(clients: Federation) -> float:
    """What the doctor measures on shuffled images, averaged over some ways to shuffle them."""
    few = drawn(untested(clients, SETTINGS), seed=0)
    trained = warmed_up(few, None, SETTINGS)
    dealt = (norm_statistics(on_other_data(trained, shuffled(few, seed), None, SETTINGS)) for seed in range(6))
    return statistics.fmean(value for found in dealt for value in shift_of_clients(found).values())


@pytest.mark.parametrize("inverted", [None, 2])
def test_chance_from_sums_is_chance_by_shuffling(inverted: int | None) -> None:
    assert diagnosis(inverted).measures.shift_by_chance == pytest.approx(by_shuffling(federation(inverted)), rel=0.3)


def test_chance_is_the_formula() -> None:
    own = {
        "a": {"bn": Statistics(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 1.0]))},
        "b": {"bn": Statistics(torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 1.0]))},
    }
    spreads = {name: {"bn.running_mean": torch.tensor([1.0, 0.5])} for name in own}
    found = shift_by_chance(NormStatistics("data", own), spreads, {"a": 10, "b": 10})
    # Channel 1: between 1, S = 1 + 1, V = 1 + 3; channel 2: between 0, S = 0.5, V = 1.
    assert found == pytest.approx(math.sqrt((2 / 4 + 0.5 / 1) / 2 * (1 / 10 + 1 / 10)), rel=1e-4)


def answers_by_class(features: torch.Tensor, labels: torch.Tensor, owners: torch.Tensor) -> dict[str, Reply]:
    found = {}
    for owner in owners.unique().tolist():
        own = [features[(owners == owner) & (labels == label)] for label in range(3)]
        sums = torch.stack([torch.stack([part.sum(0) for part in own]), torch.stack([part.square().sum(0) for part in own])])
        found[str(owner)] = Reply(str(owner), Payload(extras={"counts": torch.tensor([len(p) for p in own]), "sums": sums}), 60)
    return found


def test_distance_of_domains_from_sums_is_that_of_the_features() -> None:
    stream = torch.Generator().manual_seed(1)
    owners, labels = torch.arange(4).repeat_interleave(60), torch.arange(240) % 3
    features = torch.randn(240, 40, dtype=torch.float64, generator=stream) + 0.3 * owners[:, None] + labels[:, None]
    distance, by_chance = domains_of(answers_by_class(features, labels, owners))
    assert distance == pytest.approx(class_distance(features, labels, owners))
    dealt = statistics.fmean(class_distance(features, labels, shuffled_in_classes(labels, owners, seed)) for seed in range(20))
    assert by_chance == pytest.approx(dealt, rel=0.05)


def test_one_client_alone_has_no_distance_of_domains() -> None:
    assert all(map(math.isnan, domains_of({})))


def experiment() -> Experiment:
    return Experiment(replace(SETTINGS, method=METHOD, rounds=1, local_steps=1), federation(None))


def answered(question: str, change: dict[str, object]) -> list[str]:
    """The clients whose answers count, where the one of c0 is changed."""
    made = experiment()

    def meddled(ask: Ask) -> Iterator[Reply]:
        for reply in made.backend(ask):
            extras = {**reply.extras, **change} if reply.client == "c0" else reply.extras
            yield replace(reply, payload=Payload(reply.entries, extras))

    shape = [2, *shape_of_features(made.bench)]
    ask = Ask(question, {info.id: Payload(made.server.outgoing(info.id), {"shape": shape}) for info in made.server.clients})
    return sorted(reply.client for reply in made.asking(meddled)(ask))


@pytest.mark.parametrize(
    ("question", "change"),
    [
        (STATISTICS, {"images": 10**6}),
        (STATISTICS, {"images": 0}),
        (STATISTICS, {"spread": {}}),
        (BY_CLASS, {"labels": torch.zeros(3, dtype=torch.int64)}),
        (BY_CLASS, {"counts": torch.full((10,), -1)}),
        (BY_CLASS, {"sums": -torch.ones(2, 10, 256, dtype=torch.float64)}),
        (BY_CLASS, {"sums": torch.full((2, 10, 256), math.nan, dtype=torch.float64)}),
    ],
)
def test_sums_that_cannot_be_are_refused(question: str, change: dict[str, object]) -> None:
    assert answered(question, {}) == ["c0", "c1", "c2", "c3", "c4"]
    assert answered(question, change) == ["c1", "c2", "c3", "c4"]


def test_sums_of_a_class_with_few_images_stay_at_the_client() -> None:
    made = experiment()
    ask = Ask(BY_CLASS, {"c0": Payload(made.server.outgoing("c0"), {"shape": [2, *shape_of_features(made.bench)]})})
    (reply,) = made.ask_clients(ask)
    counts, sums = reply.extras["counts"], reply.extras["sums"]
    assert 0 < int((counts > 0).sum()) < 10 and int(counts[counts > 0].min()) >= FEWEST
    assert not bool(sums[:, counts == 0].any()) and bool(sums[1, counts > 0].any())
    assert int(reply.extras["labels"].sum()) == len(made.federation.clients[0].train)


def test_the_sum_of_a_few_images_stays_at_the_client(caplog: pytest.LogCaptureFixture) -> None:
    whole = federation(None)
    small = [replace(client, train=client.train.subset(torch.arange(7 if client.id == "c1" else 20))) for client in whole.clients]
    found = measured_from_aggregates(untested(replace(whole, clients=tuple(small)), SETTINGS), None, SETTINGS)
    assert sorted(found.shift) == ["c0", "c2", "c3", "c4"] and found.looked_at == 4
    assert "Client c1 has 7 training images; the doctor's sums need at least 8." in caplog.text


def test_fewer_than_two_clients_are_not_compared() -> None:
    alone = replace(federation(None), clients=federation(None).clients[:1])
    with pytest.raises(TooFewReplies, match="1 clients told the doctor"):
        measured_from_aggregates(untested(alone, SETTINGS), None, SETTINGS)


def test_the_command_shows_what_a_real_federation_would_see(polyfed: Command) -> None:
    words = ("doctor", "digits-mini(per_domain=30)", "--model", "small_cnn(width=4)", "--batch-size", "8", "--aggregates-only")
    told = polyfed(*words, "--json")
    assert told.code == 0, told.err
    assert "gradient bias is left out: needs a simulation" in told.out and told.json["aggregates_only"]
    again = package.doctor("digits-mini(per_domain=30)", "small_cnn(width=4)", aggregates_only=True, batch_size=8).as_json()
    assert again["findings"] == told.json["findings"]
