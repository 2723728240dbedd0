"""Check features, spread, confidence, t-SNE and grids on cases with known results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from helpers import tiny_runs
from polyfed.core.data_types import ArrayExamples, ClientData, Federation
from polyfed.errors import DataError, SettingError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.studies.analyse.confidence import answers_of, confidence
from polyfed.studies.analyse.features import SERVER, feature_similarity, silhouette, tsne
from polyfed.studies.analyse.local_models import layer_spread, states_as_tested
from polyfed.studies.analyse.score_grid import GridRun, score_grid


def test_equal_models_have_equal_features_and_negated_weights_opposite_ones() -> None:
    experiment = tiny_runs.built("fedavg")
    states = dict(states_as_tested(experiment))
    same = feature_similarity(experiment, images=6, states=states)
    assert all(pair.cosine == pytest.approx(1) for pair in same.pairs)
    assert same.mean(with_server=False) == pytest.approx(1)
    opposite = copy.deepcopy(states)
    opposite["small"]["stem.0.weight"] = -opposite["small"]["stem.0.weight"]
    found = feature_similarity(experiment, images=6, layers=["stem.0"], states=opposite)
    cosines = {(pair.one, pair.other): pair.cosine for pair in found.pairs}
    assert cosines["big", "middle"] == pytest.approx(1) and cosines["big", SERVER] == pytest.approx(1)
    assert cosines["big", "small"] == cosines["middle", "small"] == pytest.approx(-1)
    assert found.mean(with_server=True) == pytest.approx((1 + 1 - 1) / 3)
    assert set(found.maps) == {"stem.0"} and set(found.maps["stem.0"]) == {"big", "middle", "small", "new"}
    assert found.maps["stem.0"]["big"]["small"].shape == (8, 8)


def test_features_after_local_training_differ() -> None:
    found = feature_similarity(tiny_runs.built("fedavg", lr=0.5), images=4)
    assert found.mean(with_server=False) < 0.9999


def test_the_spread_of_models_is_the_deviation_of_their_weights() -> None:
    experiment = tiny_runs.built("fedavg")
    assert all(one.deviation == 0 for one in layer_spread(experiment))
    states = dict(states_as_tested(experiment))
    for place, state in enumerate(states.values()):
        state["head.weight"] = torch.full_like(state["head.weight"], float(place))
    found = {one.entry: one for one in layer_spread(experiment, states.items())}
    assert found["head.weight"].deviation == pytest.approx((2 / 3) ** 0.5)
    assert found["head.weight"].relative == pytest.approx((2 / 3) ** 0.5 / (5 / 3) ** 0.5)
    assert found["stem.0.weight"].deviation == 0 and not any("running" in name for name in found)
    with pytest.raises(DataError, match="needs two clients"):
        layer_spread(tiny_runs.built("fedavg", {"only": 6}))


def test_confidence_of_right_and_wrong_answers() -> None:
    def part(labels: list[int], answers: list[int], sure: list[float]) -> dict[str, torch.Tensor]:
        return {"labels": torch.tensor(labels), "answers": torch.tensor(answers), "confidence": torch.tensor(sure)}

    answers = {
        ("seen", "a", "x"): part([0, 1], [0, 0], [0.95, 0.6]),
        ("seen", "b", "y"): part([2, 2], [2, 1], [0.85, 0.4]),
        ("unseen", "newcomer", "z"): part([1], [0], [0.99]),
    }
    found = {(one.view, one.right): one for one in confidence(answers, bins=10)}
    assert found["seen", True].count == 2 and found["seen", True].mean == pytest.approx(0.9)
    assert found["seen", False].mean == pytest.approx(0.5)
    assert list(found["seen", True].histogram) == [0, 0, 0, 0, 0, 0, 0, 0, 0.5, 0.5]
    assert found["unseen", True].count == 0 and found["unseen", False].mean == pytest.approx(0.99)


def test_predictions_can_be_recomputed() -> None:
    experiment = tiny_runs.trained("fedavg", rounds=1)
    found = answers_of(experiment)
    assert set(found) == {("seen", name, name) for name in ("big", "middle", "small")} | {("unseen", "newcomer", "new")}
    right = sum(one.count for one in confidence(found) if one.right and one.view == "seen")
    rows = [row for row in experiment.evaluate() if row.view == "seen"]
    assert right == sum(round(row.numbers["accuracy"] * 6) for row in rows)


class OnlyHead(nn.Module):
    """Its features are the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x.flatten(1))
        return logits


def test_separated_classes_stay_separated_in_two_dimensions() -> None:
    stream = torch.Generator().manual_seed(0)
    clients = []
    for name in ("a", "b"):
        y = torch.arange(20) % 2
        x = (torch.rand(20, 3, 2, 2, generator=stream) * 20 + 200 * y[:, None, None, None]).to(torch.uint8)
        clients.append(ClientData(name, (name,), ArrayExamples(x, y), {name: ArrayExamples(x, y)}))
    experiment = Experiment(Settings(rounds=1), Federation("far", ("no", "yes"), tuple(clients)), "fedavg", OnlyHead())
    found = tsne(experiment)
    assert found.places.shape == (40, 2) and set(found.domains) == {"a", "b"} and set(found.views) == {"seen"}
    distances = torch.cdist(found.places, found.places).fill_diagonal_(float("inf"))
    nearest = distances.argmin(1).tolist()
    assert all(found.labels[one] == found.labels[other] for one, other in enumerate(nearest))
    assert found.by_class > 0.9 and abs(found.by_domain) < 0.1


def test_the_silhouette_equals_a_manual_calculation() -> None:
    found = silhouette(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), ["a", "a", "b", "b"])
    assert found == pytest.approx((2 * (1 - 1 / 10.5) + 2 * (1 - 1 / 9.5)) / 4)
    assert silhouette(torch.zeros(3, 1), ["a", "a", "a"]) != silhouette(torch.zeros(3, 1), ["a", "a", "a"])  # NaN


def run_of(method: str, steps: int, partition: str, score: float) -> GridRun:
    return GridRun(method, {"local_steps": steps, "partition": partition, "lr": 0.1}, score)


def test_a_grid_has_the_differences_of_the_means_over_seeds() -> None:
    runs = [
        run_of("a", 1, "even", 0.5), run_of("a", 1, "even", 0.7), run_of("b", 1, "even", 0.4),
        run_of("a", 10, "even", 0.3), run_of("b", 10, "even", 0.9),
        run_of("a", 1, "skewed", 0.2), run_of("b", 1, "skewed", 0.1),
        run_of("a", 10, "skewed", 0.8),
    ]  # fmt: skip
    found = score_grid(runs)
    assert found.axes == ("local_steps", "partition") and list(found.rows) == [1, 10] and list(found.columns) == ["even", "skewed"]
    (first, second), (third, fourth) = found.differences()
    assert first == pytest.approx(0.2) and second == pytest.approx(0.1) and third == pytest.approx(-0.6) and fourth is None
    with pytest.raises(SettingError, match="compares two methods; got 3"):
        score_grid([*runs, run_of("c", 1, "even", 0.1)])
    with pytest.raises(SettingError, match="one or two axes, but all runs have the same settings"):
        score_grid([run_of("a", 1, "even", 0.5), run_of("b", 1, "even", 0.4)])
    assert score_grid([*runs, run_of("c", 1, "even", 0.1)], methods=("a", "b")).differences()[0][0] == pytest.approx(0.2)
