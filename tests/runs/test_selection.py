"""The round with the best validation scores is the model that a run ends with."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers.recorded_runs import Killed, experiment_of, go_on
from helpers.tiny_runs import tiny_net
from polyfed.core.client import score
from polyfed.core.evaluation import Row
from polyfed.errors import DataError, RunFolderError, TooFewReplies
from polyfed.runs.callback import Callback, RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.run_folder import RunFolder
from polyfed.settings import Settings
from polyfed.testing import SIZES, tiny_federation

VALUES = {1: 0.2, 2: 0.7, 3: 0.7, 4: 0.6}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[str]]:
    """Validation accuracies by round are given in advance, so that the best round is known. Returns who gives none in which round."""
    original = Experiment.evaluate
    quiet: dict[int, set[str]] = {}

    def given(self: Experiment, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> list[Row]:
        number = self.server.round
        if split == "validation":
            heard = [client for client in self.server.ids if client not in quiet.get(number, ())]
            return [Row("validation", client, client, {"accuracy": VALUES[number]}) for client in heard]
        return original(self, split, newcomer, in_detail)

    monkeypatch.setattr(Experiment, "evaluate", given)
    return quiet


def select(folder: Path | None, method: str = "fedbn", stop: int | None = None, **changes: Any) -> Any:
    experiment = experiment_of(method, selection="best_validation", **changes)

    def cut(server: Any) -> None:
        if server.round == stop:
            raise Killed

    return train_run(experiment, None if folder is None else RunFolder(folder), observers=[cut])


def chosen_round(folder: Path) -> set[int]:
    return {line["selected_round"] for line in RunFolder(folder).metrics() if line["view"].startswith("selected_")}


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("method", ["fedbn", "hfedf"])
def test_the_best_validation_round_is_the_model_the_run_ends_with(tmp_path: Path, method: str) -> None:
    chosen = select(tmp_path / "run", method)
    at_two = train_run(experiment_of(method, rounds=2), None) if method != "hfedf" else None
    if at_two is not None:
        assert chosen.digest == at_two.digest and chosen.accuracy == at_two.accuracy
    assert chosen.digest == select(None, method).digest
    assert go_on(tmp_path / "run").digest == chosen.digest
    assert go_on(tmp_path / "run").accuracy == chosen.accuracy
    assert chosen_round(tmp_path / "run") == {2}
    scores = [line["accuracy"] for line in RunFolder(tmp_path / "run").metrics() if line["view"] == "validation"]
    assert scores[:: len(SIZES)] == list(VALUES.values())


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_selection_survives_a_kill(tmp_path: Path, stop: int) -> None:
    whole = select(tmp_path / "whole")
    with pytest.raises(Killed):
        select(tmp_path / "cut", stop=stop)
    assert go_on(tmp_path / "cut").digest == whole.digest
    assert RunFolder(tmp_path / "cut").metrics() == RunFolder(tmp_path / "whole").metrics()


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("damage", ["manifest", "server", "client", "all gone"])
def test_another_model_never_passes_for_the_best_one(tmp_path: Path, damage: str) -> None:
    with pytest.raises(Killed):
        select(tmp_path / "cut", stop=3)
    best = tmp_path / "cut" / "best"
    if damage == "all gone":
        shutil.rmtree(best)
    else:
        newest = sorted(best.glob(f"{damage}-*"))[-1]
        newest.write_bytes(newest.read_bytes()[:-7] + b"damaged")
    named = "manifest-000002.json" if damage == "all gone" else newest.name
    with pytest.raises(
        RunFolderError, match=rf"that of round 2, is lost: .*{named}.*another --out, or begin another run from its last state"
    ):
        go_on(tmp_path / "cut")


def test_a_best_round_that_later_ones_overwrote_is_found_again_or_missed_aloud(
    tmp_path: Path, silent: dict[int, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in round 4 with a checkpoint of round 1: the best of then lies under the two that came later."""
    for number, value in enumerate((0.1, 0.2, 0.3, 0.2), 1):
        monkeypatch.setitem(VALUES, number, value)
    whole = select(None)
    for name in ("found", "missed"):
        with pytest.raises(Killed):
            select(tmp_path / name, stop=1)
        checkpoint = tmp_path / name / "checkpoint"
        shutil.copytree(checkpoint, tmp_path / f"{name}-of-then")
        with pytest.raises(Killed):
            resume(tmp_path / name, data=tiny_federation(), model=tiny_net(), observers=[lambda server: _killed(server.round == 3)])
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / f"{name}-of-then", checkpoint)
        assert not (tmp_path / name / "best" / "manifest-000001.json").exists()
    assert go_on(tmp_path / "found").digest == whole.digest
    silent |= {number: {"small"} for number in (2, 3, 4)}
    with pytest.raises(RunFolderError, match=r"that of round 1, is lost: .*best holds later rounds only"):
        go_on(tmp_path / "missed")


def _killed(now: bool) -> None:
    if now:
        raise Killed


def test_rounds_are_compared_over_the_same_clients_only(
    tmp_path: Path, silent: dict[int, set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    silent[2] = {"small", "big"}
    select(tmp_path / "run")
    assert chosen_round(tmp_path / "run") == {3}
    assert "Round 2 cannot be the best one: no validation scores came from big, small." in caplog.messages


def test_where_no_round_can_be_chosen_the_last_is_looked_at_again(tmp_path: Path, silent: dict[int, set[str]]) -> None:
    silent |= {number: set(SIZES) for number in VALUES}
    with pytest.raises(TooFewReplies, match="a round in which all 3 clients answer with validation scores, and there was none"):
        select(tmp_path / "run")
    silent.clear()
    assert go_on(tmp_path / "run").digest == train_run(experiment_of(), None).digest
    assert chosen_round(tmp_path / "run") == {4}


def test_selection_without_validation_data_is_refused_before_training() -> None:
    federation = tiny_federation()
    first, *others = federation.clients
    bare = replace(federation, clients=(replace(first, validation=None), *others))
    with pytest.raises(DataError, match=r"1 of 3 clients of tiny have none \(big\)\. Use --selection last"):
        Experiment(Settings(selection="best_validation"), bare, model=tiny_net())
    Experiment(Settings(), bare, model=tiny_net())


@pytest.mark.parametrize("method", ["fedavg", "gperxan"])
def test_a_round_may_be_chosen_by_what_clients_have_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    sizes = {"a": 12, "b": 6, "c": 9}
    values = {"a": [0.5, 0.5, 0.9, 0.9], "b": [0.8, 0.9, 0.0, 0.1], "c": [0.1, 0.2, 0.6, 0.5]}
    asked = []

    def given(client: Any) -> float:
        asked.append((client.round, client.id, client.bench.model.training))
        return values[client.id][client.round - 1]

    monkeypatch.setattr("polyfed.backends.in_process.local_validation", given)
    chosen = train_run(local_selection(method, sizes), RunFolder(tmp_path / "run"))
    assert sorted(asked) == [(number, client, True) for number in (1, 2, 3, 4) for client in "abc"], "right after training"
    lines = [line for line in RunFolder(tmp_path / "run").metrics() if line["view"] == "local_validation"]
    assert {(line["round"], line["client"], line["accuracy"]) for line in lines} == {
        (number, client, values[client][number - 1]) for number in (1, 2, 3, 4) for client in "abc"
    }
    assert chosen_round(tmp_path / "run") == {3}, "by size: 0.475, 0.522, 0.600, 0.567; unweighted, round 2 would win"
    assert chosen.digest == train_run(local_selection(method, sizes, rounds=3, selection="last"), None).digest


@pytest.mark.parametrize("selection", ["best_validation", "best_local_validation"])
def test_test_data_are_scored_once_if_validation_chooses_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    asked: list[tuple[int, str]] = []
    original = Experiment.evaluate

    def noting(self: Experiment, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> list[Row]:
        asked.append((self.server.round, split))
        return original(self, split, newcomer, in_detail)

    class Heard(Callback):
        views: ClassVar[list[set[str]]] = []

        def after_evaluation(self, run: RunState) -> None:
            self.views.append({row.view for row in run.scores})

    monkeypatch.setattr(Experiment, "evaluate", noting)
    experiment = experiment_of("fedavg", selection=selection, evaluate_every=2)
    train_run(experiment, RunFolder(tmp_path / "run"), callbacks=[Heard()])
    view = "validation" if selection == "best_validation" else "local_validation"
    assert asked == ([(2, "validation"), (4, "validation")] if view == "validation" else []) + [(4, "test")]
    lines = RunFolder(tmp_path / "run").metrics()
    assert {line["round"] for line in lines if line["view"] == view} == {2, 4} and Heard.views == [{view}, {view}]
    assert not [line for line in lines if line["view"] in ("seen", "unseen")]
    assert [line["round"] for line in lines if line["view"] == "selected_unseen"] == [4]


def local_selection(method: str, sizes: dict[str, int], **changes: Any) -> Experiment:
    values = {"rounds": 4, "batch_size": 4, "lr": 0.05, "selection": "best_local_validation"} | changes
    return Experiment(Settings(**values), tiny_federation(sizes), method, tiny_net())


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_what_clients_have_trained_is_scored_before_it_is_averaged(method: str) -> None:
    experiment = local_selection(method, {"a": 12, "b": 6}, rounds=1)
    trained: dict[str, dict[str, Any]] = {}

    def noting(ask_clients: Any) -> Any:
        def ask(question: Any) -> Any:
            for reply in ask_clients(question):
                trained[reply.client] = {name: value.detach().clone() for name, value in experiment.bench.live.items()}
                yield reply

        return ask

    experiment.train(through=noting)
    scores = experiment.backend.validations_of_round
    assert set(scores) == set(trained) == {"a", "b"}
    for client, state in trained.items():
        experiment.bench.load(state)
        data = experiment.backend.data[client].validation
        assert data is not None
        assert score(experiment.bench, data).accuracy == scores[client]


def test_other_runs_score_nothing_after_training() -> None:
    experiment = local_selection("fedavg", {"a": 12, "b": 6}, rounds=1, selection="best_validation")
    experiment.train()
    assert experiment.backend.validations_of_round == {}


def test_choosing_by_what_clients_have_trained_needs_validation_data() -> None:
    bare = replace(tiny_federation(), clients=tuple(replace(client, validation=None) for client in tiny_federation().clients))
    with pytest.raises(DataError, match="--selection best_local_validation chooses a round on validation data"):
        Experiment(Settings(selection="best_local_validation"), bare, model=tiny_net())


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("method", ["fedwon + dp_sgd(epsilon=8)", "dp_fedavg(epsilon=8.0)"])
def test_rounds_after_the_best_one_stay_in_the_privacy_account(tmp_path: Path, method: str) -> None:
    pytest.importorskip("opacus", reason="needs the privacy extra")
    all_rounds = train_run(experiment_of(method), None)
    chosen = select(tmp_path / "run", method)
    spent, key = all_rounds.summary()["privacy"], method.split(" + ")[-1].split("(")[0]
    assert chosen_round(tmp_path / "run") == {2} and chosen.digest != all_rounds.digest
    assert chosen.summary()["privacy"] == spent and spent["epsilon_spent"] > 7.9
    histories = [
        {client: state.memory[key] for client, state in run.experiment.backend.client_states.items()}
        for run in (chosen, all_rounds)
    ]
    assert histories[0] == histories[1] and set(histories[0]) == set(SIZES)
    assert go_on(tmp_path / "run").summary()["privacy"] == spent
