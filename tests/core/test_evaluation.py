"""Two views kept apart, and what a newcomer gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import polyfed
from polyfed.core.client import Client
from polyfed.core.data_types import ArrayExamples, DatasetExamples, Federation, in_batches
from polyfed.core.evaluation import averaged_state, nearest_client, re_estimated
from polyfed.core.workbench import ClientState
from polyfed.errors import DataError, ModelError, SettingError, UnknownName
from polyfed.runs.assemble import from_torch
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.studies.report.run_record import domain_rows
from polyfed.tasks.metrics import over_examples
from polyfed.testing import TinyNet, tiny_federation


def trained(method: str, **changes: Any) -> Experiment:
    torch.manual_seed(3)
    experiment = Experiment(
        Settings(method=method, **({"rounds": 2, "batch_size": 4} | changes)), tiny_federation(), model=TinyNet()
    )
    experiment.train()
    return experiment


def accuracy_by_hand(model: nn.Module, examples: Any, experiment: Experiment) -> float:
    x, y = examples.batch(slice(None))
    with torch.no_grad():
        return float((model(experiment.bench.preparation.for_testing(x)).argmax(1) == y).float().mean())


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "local"])
def test_seen_accuracy_is_each_clients_own_model_on_its_own_test(method: str) -> None:
    result = polyfed.run(tiny_federation(), method, TinyNet(), rounds=2, batch_size=4)
    for client in tiny_federation().clients:
        expected = accuracy_by_hand(result.model_for(client.id), client.tests[client.id], result.experiment)
        assert result.accuracy["seen"][client.id] == pytest.approx(expected)
    values = list(result.accuracy["seen"].values())
    assert result.accuracy["mean"] == pytest.approx(sum(values) / 3) and result.accuracy["worst"] == min(values)


def test_the_newcomer_of_fedbn_has_averaged_batch_norm() -> None:
    experiment = trained("fedbn")
    state = experiment.exchange(averaged_state(experiment.server))
    kept = experiment.backend.client_states
    for name in kept["big"].entries:
        if kept["big"].entries[name].is_floating_point():
            mean = sum(n / 26 * kept[c].entries[name].double() for c, n in (("big", 13), ("middle", 8), ("small", 5)))
            torch.testing.assert_close(state[name].double(), mean, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
    assert torch.equal(state["head.weight"], experiment.server.state["head.weight"])


def test_clients_that_never_trained_do_not_dilute_the_average() -> None:
    experiment = trained("fedbn", clients_per_round=1, rounds=1)
    (only,) = experiment.backend.client_states
    state = experiment.exchange(averaged_state(experiment.server))
    assert torch.equal(state["stem.1.running_mean"], experiment.backend.client_states[only].entries["stem.1.running_mean"])


def test_re_estimated_statistics_are_those_of_the_target() -> None:
    experiment = trained("silobn")
    x = experiment.bench.preparation.for_testing(experiment.federation.unseen["new"].batch(slice(None))[0])
    state = re_estimated(experiment.bench, experiment.exchange(averaged_state(experiment.server)), iter([x]))
    with torch.no_grad():
        before_norm = nn.functional.conv2d(x, state["stem.0.weight"], padding=1)
    torch.testing.assert_close(state["stem.1.running_mean"], before_norm.mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["stem.1.running_var"], before_norm.transpose(0, 1).flatten(1).var(dim=1), rtol=1e-4, atol=1e-5)
    assert experiment.bench.model.stem[1].momentum == 0.1  # type: ignore[index, union-attr]


def test_re_estimated_statistics_count_batches_by_their_size() -> None:
    experiment = trained("silobn")
    x = experiment.bench.preparation.for_testing(experiment.federation.unseen["new"].batch(slice(None))[0])
    state = re_estimated(experiment.bench, experiment.exchange(averaged_state(experiment.server)), iter([x[:5], x[5:]]))
    with torch.no_grad():
        before_norm = nn.functional.conv2d(x, state["stem.0.weight"], padding=1)
    torch.testing.assert_close(state["stem.1.running_mean"], before_norm.mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert experiment.bench.model.stem[1].momentum == 0.1  # type: ignore[index, union-attr]


def flat_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def test_a_last_batch_of_one_is_re_estimated_with_the_one_before() -> None:
    experiment = Experiment(
        Settings(method="silobn", rounds=1, batch_size=4, test_batch_size=5), tiny_federation(), model=flat_net()
    )
    experiment.train()
    (row,) = experiment.unseen_rows("new", "re-estimated")
    assert row.numbers["count"] == 6
    new = experiment.federation.unseen["new"]
    assert [len(x) for x, _ in in_batches(new, 5)] == [5, 1] and [len(x) for x, _ in in_batches(new, 5, minimum=2)] == [6]
    assert [len(x) for x, _ in in_batches(new, 1, minimum=2)] == [2, 2, 2]
    experiment.federation = replace(experiment.federation, unseen={"new": new.subset(torch.tensor([0]))})
    with pytest.raises(DataError, match=r"one input.*--newcomer averaged"):
        experiment.unseen_rows("new", "re-estimated")


def test_test_batches_of_large_images_are_smaller_and_score_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of 8x8 pixels, and a bound that holds two of them."""
    experiment = trained("fedavg", test_batch_size=5)
    assert experiment.bench.test_batch_size == 5
    sizes: list[int] = []
    experiment.bench.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    (whole,) = experiment.unseen_rows("new", "averaged")
    assert sizes == [5, 1]
    sizes.clear()
    monkeypatch.setattr("polyfed.core.workbench.PIXELS_OF_A_TEST_BATCH", 2 * 8 * 8 + 63)
    (bounded,) = experiment.unseen_rows("new", "averaged")
    assert sizes == [2, 2, 2] and bounded.numbers["accuracy"] == whole.numbers["accuracy"]
    monkeypatch.setattr("polyfed.core.workbench.PIXELS_OF_A_TEST_BATCH", 1)
    assert experiment.bench.test_batch_size == 1, "an image beyond the bound is scored alone"


def test_the_nearest_client_is_the_one_the_target_came_from() -> None:
    experiment = trained("fedbn", rounds=40, lr=0.01)
    from polyfed.core.evaluation import client_states

    states = experiment.exchange(client_states(experiment.server))
    for client in experiment.federation.clients:
        x = experiment.bench.preparation.for_testing(client.train.batch(slice(None))[0])
        assert nearest_client(experiment.bench, states, lambda x=x: iter([x])) == client.id  # type: ignore[misc]


@pytest.mark.parametrize("choice", ["averaged", "re-estimated", "nearest", "ensemble"])
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn", "fedavg + group_norm(groups=2)"])
def test_every_choice_scores_every_method(method: str, choice: str) -> None:
    (row,) = trained(method).unseen_rows("new", choice)
    assert row.view == "unseen" and 0 <= row.numbers["accuracy"] <= 1 and row.numbers["count"] == 6


def test_an_ensemble_averages_probabilities() -> None:
    experiment = trained("fedbn")
    (row,) = experiment.unseen_rows("new", "ensemble")
    x, y = experiment.federation.unseen["new"].batch(slice(None))
    total = torch.zeros(len(y), 3)
    for client in experiment.federation.clients:
        at_work = Client(client, experiment.bench, experiment.backend.client_states.get(client.id, ClientState()), 2)
        at_work.receive(experiment.server.outgoing(client.id))
        with torch.no_grad():
            total += experiment.bench.model.eval()(experiment.bench.preparation.for_testing(x)).softmax(1) / 3
    assert row.numbers["accuracy"] == pytest.approx(float((total.argmax(1) == y).float().mean()))


def test_evaluation_changes_nothing_that_is_trained() -> None:
    from polyfed.runs.result import Result

    plain, watched = (
        trained("fedbn", rounds=3),
        Experiment(Settings(method="fedbn", rounds=3, batch_size=4), tiny_federation(), model=_same_net()),
    )
    watched.train([lambda server: watched.evaluate() and None if server.round else None])
    assert Result(plain, []).digest == Result(watched, []).digest


def _same_net() -> TinyNet:
    torch.manual_seed(3)
    return TinyNet()


def test_one_client_per_domain_is_asked_where_all_models_are_the_same() -> None:
    experiment = trained("fedavg")
    experiment.evaluate()
    assert experiment.costs.messages["evaluation"] == 3
    federation = tiny_federation({f"c{i}": 5 for i in range(6)})
    same = {"d": federation.clients[0].tests["c0"]}
    federation = replace(federation, clients=tuple(replace(c, domains=("d",), tests=same) for c in federation.clients))
    shared = Experiment(Settings(method="fedavg", rounds=1, batch_size=4), federation, model=TinyNet())
    shared.evaluate()
    assert shared.costs.messages["evaluation"] == 1
    personal = Experiment(Settings(method="fedbn", rounds=1, batch_size=4), federation, model=TinyNet())
    personal.evaluate()
    assert personal.costs.messages["evaluation"] == 6


def of_one_domain(sizes: dict[str, int]) -> Federation:
    """Clients of the domain d, each with a test set of its own."""
    federation = tiny_federation(sizes)
    clients = tuple(replace(c, domains=("d",), tests={"d": c.train}) for c in federation.clients)
    return replace(federation, clients=clients)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "central"])
def test_clients_of_one_domain_with_tests_of_their_own_are_all_asked_and_count_by_their_tests(method: str) -> None:
    sizes = {"one": 15, "two": 6, "three": 9}
    result = polyfed.run(of_one_domain(sizes), method, TinyNet(), rounds=1, batch_size=5)
    assert sum(row.numbers["count"] for row in result.rows if row.view == "seen") == 30
    right = sum(row.numbers["right"] for row in result.rows if row.view == "seen")
    assert result.accuracy["seen"] == {"d": pytest.approx(right / 30)}
    (row,) = (row for row in domain_rows(result.summary()) if row.view == "seen")
    assert row.accuracy == pytest.approx(right / 30) and row.count == 30


def test_the_error_of_several_tests_is_that_of_their_sum_and_of_one_test_its_own() -> None:
    scores = [{"view": "seen", "domain": "d", "accuracy": 0.5, "standard_error": 0.05, "count": 100} for _ in range(4)]
    apart, same = (domain_rows({"scores": scores, "test_sizes": {"seen": {"d": size}}})[0] for size in (400, 100))
    assert (apart.error, same.error) == (pytest.approx(0.025), pytest.approx(0.05))
    assert (apart.count, same.count) == (400, 100)


def test_tests_of_one_size_have_the_plain_mean_to_the_bit() -> None:
    values = [0.1, 0.7, 0.3, 0.9, 0.123]
    assert over_examples([{"accuracy": value, "count": 37} for value in values], "accuracy") == sum(values) / 5


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), float(self.shift + index % 3)), index % 3


def test_torch_data_sets_and_a_module_of_ones_own() -> None:
    result = polyfed.run({"a": (Pairs(0), Pairs(0)), "b": (Pairs(1), Pairs(1))}, "fedbn", TinyNet(), rounds=1, batch_size=4)
    assert set(result.accuracy["seen"]) == {"a", "b"}
    assert isinstance(result.newcomer(), TinyNet) and "fedbn" in repr(result) and "<table>" in result._repr_html_()
    with pytest.raises(DataError, match="big"):
        polyfed.run(tiny_federation(), "fedavg", TinyNet(), rounds=1, batch_size=4).model_for("bigg")


def test_seconds_of_a_run_are_those_of_training() -> None:
    result = polyfed.run(tiny_federation(), "fedavg", TinyNet(), rounds=1, batch_size=4)
    seconds = result.experiment.costs.seconds
    assert result.summary()["seconds"] == seconds["training"] < sum(seconds.values())


def test_what_is_asked_for_and_not_used_is_said() -> None:
    def told(method: str = "fedbn", **changes: Any) -> str:
        return " ".join(Experiment(Settings(method=method, **({"data": "digits-mini(per_domain=40)"} | changes))).notices)

    assert "--newcomer nearest has no effect: local defines its own newcomer model." in told("local", newcomer="nearest")
    assert "--root files has no effect: digits-mini(per_domain=40) does not use files" in told(root="files")
    assert "no effect" not in told(newcomer="nearest") + told("local")


def test_a_method_that_needs_all_clients_leaves_no_folder_where_some_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="every client must take part"):
        polyfed.run(tiny_federation(), "fedtan", TinyNet(), clients_per_round=2, batch_size=4, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_pairs_of_tensors_are_examples_too() -> None:
    data = from_torch({"a": ((torch.zeros(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])), DatasetExamples(Pairs(0)))})
    assert isinstance(data.domains[0].train, ArrayExamples) and len(data.classes) == 3
    with pytest.raises(DataError, match="train, test"):
        from_torch({"a": Pairs(0)})


def test_bad_input_gets_one_clear_sentence() -> None:
    for values, error, says in [
        ({"data": "digits-mimi"}, UnknownName, "digits-mini"),
        ({"rounds": -1}, SettingError, "rounds must be at least 1"),
        ({"lr": float("nan")}, SettingError, "lr must be a finite number, got nan"),
        ({"total_epochs": float("nan")}, SettingError, "total_epochs must be positive and finite, got nan"),
        ({"clients_per_round": float("inf")}, SettingError, "clients_per_round must be a positive number.*got inf"),
        ({"partition": "iid(clients=2)"}, SettingError, "partition= has no effect on a federation"),
        ({"few_shot": 2, "unseen_part": "all"}, SettingError, "unseen_part= and few_shot="),
        ({"unseen": ("new",)}, SettingError, "unseen= has no effect"),
        ({"root": "somewhere"}, SettingError, "root"),
        ({"data": {"a": (Pairs(0), Pairs(0))}, "root": "somewhere"}, SettingError, "root= has no effect"),
        ({"method": "fedtan", "clients_per_round": 2}, SettingError, "every client must take part in every round"),
        ({"roundz": 3}, SettingError, "rounds"),
        ({"weights": "sample"}, SettingError, "samples"),
        ({"rounds": "many"}, SettingError, "must be an integer"),
        ({"clients_per_round": 9}, SettingError, "only 3 clients"),
        ({"schedule": "cosin"}, SettingError, "cosine"),
        ({"model": nn.Sequential(nn.Flatten(), nn.Linear(192, 7))}, ModelError, r"\(2, 7\).*\(2, 3\)"),
        ({"model": nn.Linear(5, 3)}, ModelError, "does not accept inputs"),
        ({"model": "nowhere.at_all:build"}, ModelError, "module.path:function"),
        ({"model": "smal_cnn"}, UnknownName, "small_cnn"),
        ({"head": "nothing"}, ModelError, "no module 'nothing'"),
        ({"init": "missing.pth"}, SettingError, "not found"),
    ]:
        given = {"data": tiny_federation(), "method": "fedavg", "model": TinyNet(), "batch_size": 4} | values
        with pytest.raises(error, match=says):
            polyfed.run(**given)
