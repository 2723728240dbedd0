"""A run ends with the model of the round with the best validation scores."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from helpers.recorded_runs import Killed, experiment_of, go_on
from helpers.tiny_runs import tiny_net
from helpers.watching import AfterRound
from polyfed import open_run
from polyfed.core.client import score
from polyfed.core.evaluation import Row
from polyfed.errors import DataError, RunFolderError, SettingError, TooFewReplies
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.settings import Settings
from polyfed.testing import SIZES, tiny_federation

VALUES = {1: 0.2, 2: 0.7, 3: 0.7, 4: 0.6}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[str]]:
    """Set the validation accuracies by round; return the clients that report none, by round."""
    original = Experiment.evaluate
    quiet: dict[int, set[str]] = {}

    def given(self: Experiment, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> list[Row]:
        number = self.server.round
        if split == "validation":
            heard = [client for client in self.server.client_ids if client not in quiet.get(number, ())]
            return [Row("validation", client, client, {"accuracy": VALUES[number]}) for client in heard]
        return original(self, split, newcomer, in_detail)

    monkeypatch.setattr(Experiment, "evaluate", given)
    return quiet


def select(folder: Path | None, method: str = "fedbn", stop: int | None = None, **changes: Any) -> Any:
    experiment = experiment_of(method, selection="best_validation", **changes)

    def cut(server: Any) -> None:
        if server.round == stop:
            raise Killed

    return train_run(experiment, None if folder is None else RunFolder(folder), callbacks=[AfterRound(cut)])


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
        RunFolderError, match=rf"\(round 2\) is lost: .*{named}.*another --out, or start another run from its last state"
    ):
        go_on(tmp_path / "cut")


def test_a_best_round_that_later_ones_overwrote_is_found_again_or_missed_aloud(
    tmp_path: Path, silent: dict[int, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in round 4 with a checkpoint of round 1: two later rounds have overwritten its best state."""
    for number, value in enumerate((0.1, 0.2, 0.3, 0.2), 1):
        monkeypatch.setitem(VALUES, number, value)
    whole = select(None)
    for name in ("found", "missed"):
        with pytest.raises(Killed):
            select(tmp_path / name, stop=1)
        checkpoint = tmp_path / name / "checkpoint"
        shutil.copytree(checkpoint, tmp_path / f"{name}-of-then")
        with pytest.raises(Killed):
            resume(
                tmp_path / name,
                data=tiny_federation(),
                how=Reopening(model=tiny_net()),
                callbacks=[AfterRound(lambda run: _killed(run.round == 3))],
            )
        shutil.rmtree(checkpoint)
        shutil.copytree(tmp_path / f"{name}-of-then", checkpoint)
        assert not (tmp_path / name / "best" / "manifest-000001.json").exists()
    assert go_on(tmp_path / "found").digest == whole.digest
    silent |= {number: {"small"} for number in (2, 3, 4)}
    with pytest.raises(RunFolderError, match=r"\(round 1\) is lost: .*best contains only later rounds"):
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
    assert "Round 2 cannot be selected: no validation scores from big, small." in caplog.messages


def test_where_no_round_can_be_chosen_the_last_is_looked_at_again(tmp_path: Path, silent: dict[int, set[str]]) -> None:
    silent |= {number: set(SIZES) for number in VALUES}
    with pytest.raises(TooFewReplies, match="a round in which all 3 clients report validation scores, and there was none"):
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

    def noting(send_request: Any) -> Any:
        def ask(question: Any) -> Any:
            for reply in send_request(question):
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
        assert score(experiment.bench, data).results()["accuracy"] == scores[client]


def test_other_runs_score_nothing_after_training() -> None:
    experiment = local_selection("fedavg", {"a": 12, "b": 6}, rounds=1, selection="best_validation")
    experiment.train()
    assert experiment.backend.validations_of_round == {}


def test_choosing_by_what_clients_have_trained_needs_validation_data() -> None:
    bare = replace(tiny_federation(), clients=tuple(replace(client, validation=None) for client in tiny_federation().clients))
    with pytest.raises(DataError, match="--selection best_local_validation needs validation data"):
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


LAST_SCORES = (0.5, 0.9, 0.8, 0.7)
"""Accuracies after rounds 1 to 4; their last three have mean 0.8 and deviation 0.1."""


@pytest.fixture
def given_tests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Set the test accuracies by round; return the scored rounds."""
    scored: list[int] = []

    def given(self: Experiment, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> list[Row]:
        scored.append(self.server.round)
        value = LAST_SCORES[self.server.round - 1]
        detail = {"confusion": [[scored[-1]]]} if in_detail else {}
        numbers = {
            "accuracy": value,
            "count": 10,
            "right": round(10 * value),
            "class_counts": [10],
            "class_right": [round(10 * value)],
        }
        return [Row("seen", client, client, {**numbers, **detail}) for client in self.server.client_ids]

    monkeypatch.setattr(Experiment, "evaluate", given)
    return scored


def test_the_mean_of_the_last_rounds_is_reported_and_the_last_model_is_kept(tmp_path: Path, given_tests: list[int]) -> None:
    mean = train_run(experiment_of(selection="mean_last(3)"), RunFolder(tmp_path / "mean"))
    assert given_tests == [2, 3, 4]
    assert mean.accuracy["mean"] == pytest.approx(0.8)
    assert mean.rows[0].numbers["right"] == pytest.approx(8) and mean.rows[0].numbers["confusion"] == [[4]]
    assert mean.summary()["last_rounds"] == {
        "rounds": [2, 3, 4],
        "values": pytest.approx([0.9, 0.8, 0.7]),
        "mean": pytest.approx(0.8),
        "deviation": pytest.approx(0.1),
        "last": pytest.approx(0.7),
    }
    assert mean.digest == train_run(experiment_of(), None).digest
    for again in (go_on(tmp_path / "mean"), open_run(tmp_path / "mean", model=tiny_net())):
        assert again.accuracy == mean.accuracy and again.last_rounds == mean.last_rounds and again.digest == mean.digest
    assert train_run(experiment_of(selection="mean_last(3)"), None).accuracy == mean.accuracy


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
@pytest.mark.usefixtures("given_tests")
def test_the_mean_of_the_last_rounds_survives_a_kill(tmp_path: Path, stop: int) -> None:
    whole = train_run(experiment_of(selection="mean_last(3)"), RunFolder(tmp_path / "whole"))

    def cut(server: Any) -> None:
        if server.round == stop:
            raise Killed

    with pytest.raises(Killed):
        train_run(experiment_of(selection="mean_last(3)"), RunFolder(tmp_path / "cut"), callbacks=[AfterRound(cut)])
    assert go_on(tmp_path / "cut").accuracy == whole.accuracy
    assert RunFolder(tmp_path / "cut").metrics() == RunFolder(tmp_path / "whole").metrics()


def test_the_last_rounds_are_scored_next_to_the_best_validation_round(tmp_path: Path, silent: dict[int, set[str]]) -> None:
    assert not silent
    select(tmp_path / "run", evaluate_last=2)
    lines = RunFolder(tmp_path / "run").metrics()
    assert {line["round"] for line in lines if line["view"] == "seen"} == {3, 4}
    assert chosen_round(tmp_path / "run") == {2}


@pytest.mark.usefixtures("given_tests")
def test_a_last_round_that_is_not_typical_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds 1 to 3 have mean 0.8 and deviation 0.1: 0.59 is more than two deviations away, 0.61 is not."""
    for last, told in ((0.59, True), (0.61, False)):
        monkeypatch.setattr(sys.modules[__name__], "LAST_SCORES", (0.9, 0.8, 0.7, last))
        result = train_run(experiment_of(evaluate_every=1), None)
        found = [text for text in result.warnings if "not typical" in text]
        assert bool(found) == told
        assert not told or "Round 4 scores 59.0 %, but rounds 1 to 3 score 80.0 ± 10.0 %" in found[0]
        assert not train_run(experiment_of(selection="mean_last(4)"), None).outlier


@pytest.mark.parametrize("wrong", ["mean_last", "mean_last(0)", "mean_last(x)", "mean_last(3) "])
def test_a_mean_over_no_rounds_is_refused(wrong: str) -> None:
    with pytest.raises(SettingError, match="selection cannot be"):
        Settings(selection=wrong)


@pytest.mark.usefixtures("given_tests")
def test_a_mean_over_fewer_rounds_than_asked_for_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Stop(Callback):
        def after_round(self, run: RunState) -> bool:
            return run.round == 2

    result = train_run(experiment_of(selection="mean_last(2)"), None, callbacks=[Stop()])
    assert result.accuracy["mean"] == pytest.approx(LAST_SCORES[1])
    assert "mean_last(2): the run stopped early, after round 2. Scores are the mean of 1 of its last 2 rounds." in caplog.messages


def test_answers_for_images_survive_a_stop_after_the_last_scores(tmp_path: Path) -> None:
    whole = train_run(experiment_of(evaluate_every=1), RunFolder(tmp_path / "whole"))
    with pytest.raises(Killed):
        train_run(
            experiment_of(evaluate_every=1),
            RunFolder(tmp_path / "cut"),
            callbacks=[AfterRound(lambda run: _killed(run.round == 4))],
        )
    resumed = go_on(tmp_path / "cut")
    assert whole.answers and resumed.answers.keys() == whole.answers.keys()
    assert resumed.experiment.costs.bytes == whole.experiment.costs.bytes
