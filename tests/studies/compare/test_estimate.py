"""Check estimates against a fake clock, and against the costs of real runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from helpers.command_line import SHORT as SHORT_RUN
from helpers.command_line import Command, says
from polyfed.core.client import Client, Step
from polyfed.core.data_types import Federation
from polyfed.core.method import Method
from polyfed.core.part import Part
from polyfed.core.rounds import Exchange, Payload, Request
from polyfed.core.server import Server
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.studies.compare import estimate as estimator
from polyfed.studies.compare.estimate import MIN_LONG, SHORT, Estimator, shortened, spread
from polyfed.testing import TinyNet, tiny_federation

SIZES = {"north": 90, "south": 60, "west": 36}
QUESTION = "tick"


@dataclass
class Clock:
    """A clock that only advances with the work."""

    now: float = 0.0
    rounds: set[int] = field(default_factory=set)

    def process_time(self) -> float:
        return self.now

    def visit(self, client: Client) -> None:
        self.now += 5
        self.rounds.add(client.round)

    def step(self, step: Step) -> None:
        self.now += 0.25 * len(step.y)

    def setup(self, server: Server) -> Exchange[None]:
        self.now += 11
        yield Request(QUESTION, dict.fromkeys(server.client_ids, Payload()))

    def answer(self, client: Client, payload: Payload) -> Payload:
        self.now += 2 * len(client.data.train)
        return Payload()

    def method(self) -> Method:
        return Method(
            "ticking",
            before_training=(self.visit,),
            gradients=(Tick(self),),
            setup=(self.setup,),
            answers={QUESTION: self.answer},
        )


@dataclass(frozen=True)
class Tick(Part):
    clock: Clock
    stage = "clip"

    def __call__(self, step: Step) -> None:
        self.clock.step(step)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(estimator, "time", made)
    return made


def estimated(clock: Clock, **values: Any) -> estimator.Estimate:
    settings = {"rounds": 10, "batch_size": 6, "lr": 0.01} | values
    return pf.estimate(tiny_federation(SIZES), clock.method(), TinyNet(), **settings)


def test_rounds_and_openings_cost_what_all_examples_would(clock: Clock) -> None:
    found = estimated(clock)
    assert found.once == pytest.approx(11 + 2 * 186)
    assert found.round == pytest.approx(3 * 5 + 0.25 * 186)
    assert found.cpu_seconds == pytest.approx(found.once + 10 * found.round)
    assert clock.rounds == {1, 2}


@pytest.mark.parametrize(
    ("values", "clients", "examples"),
    [
        ({"local_epochs": 3}, 3, 3 * 186),
        ({"local_steps": 40}, 3, 3 * 40 * 6),
        ({"local_steps": 1}, 3, 3 * 6),
        ({"clients_per_round": 2}, 2, 2 * 186 / 3),
    ],
    ids=str,
)
def test_a_round_costs_what_its_settings_ask_for(clock: Clock, values: dict[str, Any], clients: int, examples: float) -> None:
    assert estimated(clock, **values).round == pytest.approx(clients * 5 + 0.25 * examples)


def test_pooled_data_is_one_client(clock: Clock) -> None:
    found = Estimator(
        Settings(rounds=4, batch_size=6, method="central"), tiny_federation(SIZES), pf.parse("central") + clock.method(), TinyNet()
    ).estimate(tiny_federation(SIZES))
    assert (found.clients, found.round) == (1, pytest.approx(5 + 0.25 * 186))


def test_other_data_counts_by_its_size(clock: Clock) -> None:
    assert estimated(clock, total_epochs=8.0, local_epochs=2).rounds == 4
    measured = Estimator(Settings(batch_size=6), tiny_federation(SIZES), clock.method(), TinyNet())
    assert measured.estimate(tiny_federation(SIZES | {"east": 40})).round == pytest.approx(4 * 5 + 0.25 * 226)


@pytest.mark.parametrize(
    ("values", "scorings", "validations"),
    [
        ({}, 1, 0),
        ({"evaluate_every": 2}, 3, 0),
        ({"evaluate_every": 5}, 1, 0),
        ({"selection": "best_validation"}, 1, 5),
        ({"selection": "best_validation", "evaluate_every": 2}, 1, 3),
    ],
    ids=str,
)
def test_models_are_scored_as_often_as_a_run_does(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], scorings: int, validations: int
) -> None:
    options: dict[str, Any] = {"rounds": 5, "batch_size": 4, **values}
    found = pf.estimate(tiny_federation(), "fedavg", TinyNet(), **options)
    assert (found.scorings, found.validations) == (scorings, validations)
    splits: list[str] = []
    evaluate = Experiment.evaluate

    def counting(self: Any, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> Any:
        splits.append(split)
        return evaluate(self, split, newcomer, in_detail)

    monkeypatch.setattr("polyfed.runs.experiment.Experiment.evaluate", counting)
    pf.run(tiny_federation(), "fedavg", TinyNet(), **options)
    assert (splits.count("test"), splits.count("validation")) == (scorings, validations)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedavg + topk(share=0.1)", "scaffold", "ccst", "pfedhn"])
def test_bytes_are_those_of_a_later_round(method: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "lr": 0.01}
    found = pf.estimate(tiny_federation(), method, TinyNet(), rounds=4, **options)
    two, three = (pf.run(tiny_federation(), method, TinyNet(), rounds=rounds, **options).experiment.costs for rounds in (2, 3))
    assert found.bytes_up == (three.total("up") - two.total("up")) / 3
    assert found.bytes_down == (three.total("down") - two.total("down")) / 3
    assert found.traffic == 4 * 3 * (found.bytes_up + found.bytes_down)


def test_what_changes_later_is_reported() -> None:
    options: dict[str, Any] = {"rounds": 8, "batch_size": 4, "lr": 0.01}
    assert pf.estimate(tiny_federation(), "fixbn", TinyNet(), **options).later == (5,)
    assert pf.estimate(tiny_federation(), "fedavg", TinyNet(), **options).later == ()


def test_reduced_data_keeps_classes_and_shared_test_sets() -> None:
    whole = tiny_federation(SIZES)
    test = whole.clients[0].tests["north"]
    sharing = Federation(
        "shared", whole.classes, tuple(pf.ClientData(c.id, c.domains, c.train, {"all": test}) for c in whole.clients), {"new": test}
    )
    cut = shortened(sharing, 6, 0.5)
    assert [len(client.train) for client in cut.clients] == [6, 6, 6]
    assert len({id(client.tests["all"]) for client in cut.clients}) == 1
    assert len(cut.unseen["new"]) == 3
    ordered = spread(pf.ArrayExamples(test.batch(slice(None))[0], test.labels.sort().values), 3)
    assert ordered.labels.tolist() == [0, 1, 2]
    assert spread(test, 99) is test


def test_an_estimate_does_not_affect_a_run() -> None:
    options: dict[str, Any] = {"rounds": 2, "batch_size": 4}
    net = TinyNet()
    before = pf.run(tiny_federation(), "fedbn", net, **options).digest
    pf.estimate(tiny_federation(), "fedbn", net, **options)
    assert pf.run(tiny_federation(), "fedbn", net, **options).digest == before


def test_the_long_measurement_keeps_to_its_seconds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    cut = estimator.shortened
    monkeypatch.setattr(estimator, "shortened", lambda data, most, share: lengths.append(most // 6) or cut(data, most, share))
    short_round = 3 * 5 + 0.25 * 3 * 2 * 6
    estimated(clock, seconds=10 * short_round)
    estimated(clock, seconds=0.1)
    assert lengths == [SHORT, 10, SHORT, MIN_LONG]


def test_run_estimates_instead_of_training(polyfed: Command, images: Path, tmp_path: Path) -> None:
    ended = polyfed("run", images, *SHORT_RUN, "--method", "fixbn(decay=None)", "--rounds", "8", "--estimate", "--json")
    assert ended.code == 0
    assert "the exchanged entries change in round 5" in ended.out
    assert ended.err.count("polyfed: warning: fixbn freezes statistics at a constant learning rate") == 1
    for words in ("estimated cost", "1 run: ", "core-seconds", "of traffic"):
        assert words in ended.out
    (method,) = ended.json["methods"]
    assert method["method"] == "fixbn(freeze_at=0.5, decay=None)"
    assert ended.json["core_hours"] * 3600 == pytest.approx(method["cpu_seconds"])
    assert not (tmp_path / "runs").exists()


def test_compare_estimates_every_run(polyfed: Command, images: Path, tmp_path: Path) -> None:
    options = ("--methods", "fedavg; fixup; fedbn", "--seeds", "2", "--protocol", "leave-one-out", "--workers", "2")
    ended = polyfed("compare", images, *SHORT_RUN, *options, "--estimate", "--json")
    assert ended.code == 2
    assert "Cannot run fedavg + fixup: fixup: SmallCNN has no residual branch" in ended.err
    assert "8 runs: " in ended.out
    assert "wall-clock" not in ended.out, "one client is left in each run, and needs no second worker"
    assert [len(method["runs"]) for method in ended.json["methods"]] == [4, 0, 4]
    assert not (tmp_path / "runs").exists()


def test_workers_share_the_clock(polyfed: Command, images: Path) -> None:
    ended = polyfed("compare", images, *SHORT_RUN, "--methods", "fedavg; fedbn", "--workers", "8", "--estimate", "--json")
    assert "2 runs: " in ended.out and "wall-clock time with 2 workers" in ended.out
    assert [run["workers"] for method in ended.json["methods"] for run in method["runs"]] == [2, 2]


def test_a_method_that_cannot_be_built_is_one_error(polyfed: Command, images: Path) -> None:
    says(polyfed("run", images, *SHORT_RUN, "--method", "fedavg + fixup", "--estimate"), "SmallCNN has no residual branch")
