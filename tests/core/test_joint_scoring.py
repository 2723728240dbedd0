"""Many clients with equal models are scored in one pass; where models differ, a sample of them is, drawn by the seed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.tiny_runs import tiny_net
from polyfed.core import evaluation
from polyfed.core import evaluation as joint_scoring
from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.core.evaluation import Row, sample_to_score
from polyfed.core.method import Method, parse
from polyfed.core.server import ClientInfo
from polyfed.runs.experiment import Experiment
from polyfed.runs.result import Result
from polyfed.settings import Settings
from polyfed.studies.report.run_record import domain_rows
from polyfed.tasks.classification import Scores, results_of_parts
from polyfed.tasks.metrics import COUNTS

MANY = joint_scoring.MANY + 20


def examples(size: int, stream: torch.Generator) -> ArrayExamples:
    x = torch.randint(0, 256, (size, 3, 8, 8), dtype=torch.uint8, generator=stream)
    return ArrayExamples(x, torch.randint(0, 3, (size,), generator=stream))


def many_clients(count: int = MANY) -> Federation:
    """Clients of two domains, each with tests of its own: some with one example, some with more than fit into a batch."""
    stream = torch.Generator().manual_seed(0)
    clients = []
    for number in range(count):
        domain = "a" if number % 4 else "b"
        tests = {domain: examples(70 if number % 30 == 7 else (1, 5, 9)[number % 3], stream)}
        clients.append(ClientData(f"c{number:04d}", (domain,), examples(4, stream), tests, examples(3, stream)))
    return Federation("many", ("x", "y", "z"), tuple(clients))


def experiment(
    method: str | Method = "fedavg",
    model: nn.Module | None = None,
    count: int = MANY,
    data: Federation | None = None,
    **changes: Any,
) -> Experiment:
    values = {"rounds": 1, "batch_size": 4, "clients_per_round": 5, "test_batch_size": 64} | changes
    return Experiment(Settings(**values), data or many_clients(count), method, model or tiny_net())


def one_by_one(run: Experiment, monkeypatch: pytest.MonkeyPatch, split: str = "test") -> list[Row]:
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "models_are_equal", lambda method, plan: False)
        return run.evaluate(split)


def passes_of(model: nn.Module) -> list[int]:
    """The sizes of the batches that a model is given from here on."""
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    return sizes


@pytest.mark.parametrize("split", ["test", "validation"])
def test_one_pass_gives_every_client_its_own_scores(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = experiment()
    run.train()
    apart = one_by_one(run, monkeypatch, split)
    sizes = passes_of(run.bench.model)
    together = run.evaluate(split)
    assert len(sizes) < MANY, "clients were not scored together"
    assert [(row.view, row.client, row.domain) for row in together] == [(row.view, row.client, row.domain) for row in apart]
    for one, other in zip(together, apart, strict=True):
        assert one.numbers["accuracy"] == other.numbers["accuracy"]
        same_numbers(one.numbers, other.numbers, 1e-6)


def few_clients(*sizes: int) -> Federation:
    stream = torch.Generator().manual_seed(1)
    clients = [
        ClientData(f"c{number:02d}", ("a",), examples(4, stream), {"a": examples(size, stream)}, examples(size, stream))
        for number, size in enumerate(sizes)
    ]
    return Federation("few", ("x", "y", "z"), tuple(clients))


@pytest.mark.parametrize("split", ["test", "validation"])
@pytest.mark.parametrize(
    ("sizes", "passes"),
    [
        ([9] * 20, [63, 9, 9, 63, 9, 9, 54, 9, 9]),  # seven fit into a batch of 64; the first and last of a batch are tried alone
        ([3] * 5, [15, 3, 3]),
        ([7] * 5, [7] * 5),  # 14 images twice cost more than two further clients save (REPAID)
        ([30] * 5, [30] * 5),
        ([2, 2], [2, 2]),
    ],
    ids=str,
)
def test_few_clients_share_a_batch_where_that_is_cheaper(
    split: str, sizes: list[int], passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = experiment(data=few_clients(*sizes), clients_per_round=None)
    run.train()
    apart = one_by_one(run, monkeypatch, split)
    seen = passes_of(run.bench.model)
    together = run.evaluate(split)
    assert seen == passes
    for one, other in zip(together, apart, strict=True):
        assert (one.view, one.client, one.domain) == (other.view, other.client, other.domain)
        assert all(one.numbers[name] == other.numbers[name] for name in ("accuracy", "count", "right", *COUNTS))
        same_numbers(one.numbers, other.numbers, 1e-5)


def test_in_detail_few_clients_keep_their_answers_and_areas() -> None:
    run = experiment(data=few_clients(*[9] * 20), clients_per_round=None)
    run.bench.answers = {}
    rows = run.evaluate(in_detail=True)
    assert len(run.bench.answers) == 20 and all("auroc" in row.numbers for row in rows)


def test_clients_whose_answers_hang_on_the_last_digit_are_scored_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    near = torch.tensor([[0.4, 0.2, 0.4 - 1e-7], [0.4, 0.2, 0.4 - 1e-3]])
    assert joint_scoring.near_ties(near).tolist() == [True, False]
    assert joint_scoring.near_ties(torch.ones(2, 1)).tolist() == [False, False], "one class has no second"
    run = experiment(data=few_clients(*[9] * 7), clients_per_round=None)
    sizes = passes_of(run.bench.model)
    original = joint_scoring.near_ties

    def one_tie(probabilities: Tensor) -> Tensor:
        found = original(probabilities)
        found[9 * 3 + 5] = True  # an image of the fourth client
        return found

    monkeypatch.setattr(joint_scoring, "near_ties", one_tie)
    found = run.evaluate()
    assert sizes == [63, 9, 9, 9], "the batch, its first and last client, and the fourth"
    assert [row.client for row in found] == [f"c{number:02d}" for number in range(7)]


def test_workers_score_the_same_batches() -> None:
    rows = []
    for workers in ("1", "2"):
        run = experiment(workers=workers)
        run.train()
        rows.append(run.evaluate())
        run.backend.close()
    assert rows[0] == rows[1]


class OwnStatistics(nn.Module):
    """Normalises with the statistics of the batch, in evaluation too: who shares a batch matters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, track_running_stats=False)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).square().mean(dim=(2, 3)))  # type: ignore[no-any-return]


def test_predictions_that_depend_on_the_batch_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = experiment(model=OwnStatistics())
    run.train()
    assert run.evaluate() == one_by_one(run, monkeypatch)


def test_random_predictions_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(model: nn.Module, x: Tensor) -> Tensor:
        return torch.rand(len(x), 3).softmax(dim=1)

    run = experiment(parse("fedavg") + Method("guess", predict=guess, standalone=False))
    run.train()
    assert run.evaluate() == one_by_one(run, monkeypatch)


def test_inputs_of_other_types_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are scaled before a model sees them, floating-point numbers are not."""
    data = many_clients()
    floats = [
        dataclasses.replace(client, tests={name: ArrayExamples(part.x.float() / 99, part.y) for name, part in client.tests.items()})
        if number % 2
        else client
        for number, client in enumerate(data.clients)
    ]
    run = experiment(data=dataclasses.replace(data, clients=tuple(floats)))
    run.train()
    assert run.evaluate() == one_by_one(run, monkeypatch)


def test_traffic_is_that_of_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    together, apart = experiment(), experiment()
    together.evaluate()
    one_by_one(apart, monkeypatch)
    assert together.costs.bytes == apart.costs.bytes and together.costs.messages == apart.costs.messages


def test_results_of_parts_are_those_of_each_part() -> None:
    stream = torch.Generator().manual_seed(1)
    sizes = [1, 0, 7, 30, 2]
    probabilities = torch.rand(sum(sizes), 4, generator=stream).mul(4).softmax(dim=1)
    labels = torch.randint(0, 4, (sum(sizes),), generator=stream)
    for in_detail in (False, True):
        found = results_of_parts(probabilities, labels, sizes, 4, in_detail=in_detail)
        start = 0
        for size, results in zip(sizes, found, strict=True):
            scores = Scores(4, in_detail=in_detail)
            scores.add(probabilities[start : start + size], labels[start : start + size])
            expected = {name: value for name, value in scores.results().items() if name != "auroc"}
            same_numbers(results, expected, 1e-12)
            start += size


def same_numbers(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> None:
    """Shares agree but for rounding, counts exactly."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (value if isinstance(value, int | list) else pytest.approx(value, abs=tolerance)), name


def infos(counts: dict[str, int]) -> list[ClientInfo]:
    return [ClientInfo(f"{domain}{number}", (domain,), 5) for domain, count in counts.items() for number in range(count)]


def test_a_sample_has_every_domain_by_its_share() -> None:
    clients = infos({"a": 700, "b": 290, "c": 9, "d": 1})
    chosen = sample_to_score(clients, 100, seed=0)
    assert Counter(name[0] for name in chosen) == {"a": 70, "b": 29, "c": 1, "d": 1}
    assert chosen == sample_to_score(clients, 100, seed=0) != sample_to_score(clients, 100, seed=1)
    assert len(sample_to_score(clients, 1, seed=0)) == 4, "one of each domain"
    assert sample_to_score(clients, 0, seed=0) == sample_to_score(clients, 1000, seed=0) == [info.id for info in clients]


def test_where_models_differ_a_sample_is_scored_and_the_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run = experiment("fedbn", count=40, evaluate_clients=12, rounds=2)
    assert "12 of 40 clients, sampled with the seed, are scored" in " ".join(run.notices)
    run.train()
    rows = run.evaluate()
    assert Counter(row.domain for row in rows) == {"a": 9, "b": 3}
    assert {row.client for row in rows} == {row.client for row in run.evaluate("validation")}
    whole = {(row.client, row.domain): row for row in experiment_with_all(run).evaluate()}
    assert len(whole) == 40 and all(whole[row.client, row.domain] == row for row in rows)
    summary = Result(run, rows).summary()
    assert summary["scored_clients"] == {"scored": 12, "clients": 40}
    assert {row.domain: row.count for row in domain_rows(summary)} == summary["test_sizes"]["seen"]
    assert summary["test_sizes"]["seen"]["b"] == sum(row.numbers["count"] for row in rows if row.domain == "b")


def experiment_with_all(run: Experiment) -> Experiment:
    """The same run with every client scored."""
    other = experiment("fedbn", count=40, evaluate_clients=0, rounds=2)
    other.restore(run.snapshot())
    return other


def test_where_models_are_equal_all_test_data_are_scored() -> None:
    run = experiment(count=40, evaluate_clients=12)
    assert run.scored_sample() is None and len(run.evaluate()) == 40
