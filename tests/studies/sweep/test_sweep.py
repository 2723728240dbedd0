"""Check that searches choose on validation data, read no test set before, treat all methods equally, and can be resumed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed as package
from helpers.command_line import Command, says
from helpers.recorded_runs import Killed
from polyfed.core.data_types import ArrayExamples, DataSet, Domain
from polyfed.core.method import Method, parse
from polyfed.errors import DataError, OptionError, PolyfedError, SettingError
from polyfed.runs.callbacks.callback import Callback, RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.checkpoint import digest
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings
from polyfed.studies.compare.candidates import candidates
from polyfed.studies.sweep.data import ForbiddenExamples, ReadTooSoon, with_validation, without_tests
from polyfed.studies.sweep.proposals import Proposals, is_behind, rungs
from polyfed.studies.sweep.search import Sweep
from polyfed.studies.sweep.space import Axis, applied, check_axes, grid, trials_of_each, with_option
from polyfed.studies.sweep.trials import Searcher, name_of

CLASSES = 3
SETTINGS = Settings(data="toy", model="small_cnn(width=4)", rounds=2, batch_size=8)
RATES = Axis("lr", (1e-6, 0.02))


def toy(shift: int = 0, validation: bool = True, names: tuple[str, ...] = ("bright", "dark")) -> DataSet:
    """Return images whose colour gives the class, with test labels shifted by a number of classes."""
    domains = []
    for index, name in enumerate(names):
        stream = torch.Generator().manual_seed(index)
        parts = []
        for size in (48, 24, 30):
            y = torch.arange(size) % CLASSES
            x = torch.rand(size, 3, 16, 16, generator=stream) * 60 + 40 * index
            x += 120 * torch.nn.functional.one_hot(y, CLASSES).float()[:, :, None, None]
            parts.append(ArrayExamples(x.to(torch.uint8), y))
        shifted = ArrayExamples(parts[2].x, (parts[2].y + shift) % CLASSES)
        domains.append(Domain(name, parts[0], shifted, parts[1] if validation else None))
    return DataSet("toy", tuple("abc"), tuple(domains), source="made in the test")


def sweep(folder: Path, methods: Any = None, axes: list[Axis] | None = None, **more: Any) -> Sweep:
    settings = replace(SETTINGS, **more.pop("settings", {}))
    return Sweep(settings, methods or ["fedavg"], axes or [RATES], folder, data=more.pop("data", toy()), **more)


def chosen(folder: Path) -> list[dict[str, Any]]:
    return [one["chosen"]["values"] for one in json.loads((folder / "sweep.json").read_text())["methods"]]


def test_the_choice_is_validations_even_where_the_test_says_otherwise(tmp_path: Path) -> None:
    tests = {}
    for rate in RATES.values:
        result = package.run(toy(shift=1), "fedavg", "small_cnn(width=4)", rounds=2, batch_size=8, lr=rate)
        tests[rate] = result.accuracy["mean"]
    assert tests[1e-6] > tests[0.02] + 0.2  # by the shifted labels, not learning would be better
    for name, data in (("right", toy()), ("shifted", toy(shift=1))):
        sweep(tmp_path / name, ["fedavg", "fedbn"], data=data).run()
        assert chosen(tmp_path / name) == [{"lr": 0.02}, {"lr": 0.02}]
    right, shifted = (json.loads((tmp_path / name / "sweep.json").read_text())["methods"] for name in ("right", "shifted"))
    for one, other in zip(right, shifted, strict=True):
        assert [t["validation"] for t in one["trials"]] == [t["validation"] for t in other["trials"]]
        assert one["tests"][0]["accuracy"]["mean"] > other["tests"][0]["accuracy"]["mean"] + 0.5
    assert shifted[0]["tests"][0]["accuracy"]["mean"] == tests[0.02]


def test_forbidden_examples_cannot_be_read() -> None:
    forbidden = without_tests(toy()).domains[0].test
    assert isinstance(forbidden, ForbiddenExamples) and len(forbidden) == 30
    for touch in (lambda: forbidden.labels, lambda: forbidden.batch(slice(0, 1)), lambda: forbidden.subset(torch.arange(1))):
        with pytest.raises(ReadTooSoon, match="bright"):
            touch()


def test_touching_a_test_before_the_choice_stops_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cheating(self: Experiment, split: str = "test", newcomer: str | None = None, in_detail: bool = False) -> Any:
        return honest(self, "test", newcomer, in_detail)

    honest = Experiment.evaluate
    monkeypatch.setattr(Experiment, "evaluate", cheating)
    with pytest.raises(ReadTooSoon):
        sweep(tmp_path / "s").run()


def test_trials_see_no_test_of_seen_or_unseen_domains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    honest = Searcher.train

    def watched(self: Searcher, trial: Any, experiment: Experiment, callbacks: Any) -> Any:
        federation = experiment.federation
        tests = [examples for client in federation.clients for examples in client.tests.values()]
        seen.extend([*tests, *federation.unseen.values()])
        return honest(self, trial, experiment, callbacks)

    monkeypatch.setattr(Searcher, "train", watched)
    data = toy(names=("bright", "dark", "new"))
    settings = {"unseen": ("new",), "unseen_part": "all", "few_shot": 2}
    done = sweep(tmp_path / "s", ["fedavg", "fedbn", "central", "local"], [Axis("lr", (0.1,))], data=data, settings=settings).run()
    assert len(seen) == 4 * 3 and all(isinstance(examples, ForbiddenExamples) for examples in seen)
    for one in done:
        assert set(one.outcomes[0]["accuracy"]["unseen"]) == {"new"}
    unseen = [score["count"] for score in done[0].outcomes[0]["scores"] if score["view"] == "unseen"]
    assert unseen == [48 - 2 * 2 + 24 + 30]  # the whole of the unseen domain, without the few shots of two clients


class Counting(Callback):
    """Counts the rounds that are trained, and kills at one of them."""

    def __init__(self, kill_at: int = -1) -> None:
        self.rounds, self.kill_at, self.said = 0, kill_at, []

    def begin(self, run: RunState) -> None:
        self.said.append(f"{run.number}/{run.total} {run.label}")

    def after_round(self, run: RunState) -> None:
        self.rounds += 1
        if self.rounds == self.kill_at:
            raise Killed


def results(folder: Path) -> Any:
    methods = json.loads((folder / "sweep.json").read_text())["methods"]
    for one in methods:
        for test in one["tests"]:
            test["run"] = Path(test["run"]).name
    return methods


@pytest.mark.parametrize("kill_at", [1, 4])
def test_a_killed_search_goes_on_without_training_anything_twice(tmp_path: Path, kill_at: int) -> None:
    more: dict[str, Any] = {"seeds": 2, "settings": {"checkpoint_every": "1", "rounds": 3}}
    whole = Counting()
    sweep(tmp_path / "whole", callbacks=[whole], **more).run()
    assert whole.rounds == 2 * 3 + 3  # two trials; seed 0 of the chosen one is taken over, seed 1 is trained
    first, second = Counting(kill_at), Counting()
    with pytest.raises(Killed):
        sweep(tmp_path / "cut", callbacks=[first], **more).run()
    sweep(tmp_path / "cut", callbacks=[second], **more).run()
    assert first.rounds + second.rounds == whole.rounds
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    again = Counting()
    sweep(tmp_path / "cut", callbacks=[again], **more).run()
    assert again.rounds == 0 and results(tmp_path / "cut") == results(tmp_path / "whole")


def test_a_run_taken_over_from_its_trial_is_the_run_itself(tmp_path: Path) -> None:
    done = sweep(tmp_path / "s", ["fedbn"]).run()[0].outcomes[0]
    plain = train_run(Experiment(replace(SETTINGS, method="fedbn", lr=0.02), toy()), RunFolder(tmp_path / "plain"))
    assert done["digest"] == plain.digest and done["scores"] == plain.summary()["scores"]
    assert done["bytes"] == plain.summary()["bytes"] and done["messages"] == plain.summary()["messages"]
    assert RunFolder(done["run"]).metrics() == RunFolder(tmp_path / "plain").metrics()
    snapshot, complaints = RunFolder(done["run"]).checkpoints.read()
    assert snapshot is not None and not complaints and digest(snapshot) == plain.digest and snapshot.notes["finished"]


def test_a_trial_with_other_options_of_its_method_is_another_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name_of(replace(SETTINGS, method="fedprox"), {}, "data")}
    monkeypatch.setattr(Method, "full_text", property(lambda self: "fedprox(mu=0.5)"))
    names.add(name_of(replace(SETTINGS, method="fedprox"), {}, "data"))
    assert len(names) == 2


def test_a_run_continued_from_its_trial_keeps_the_selected_round(tmp_path: Path) -> None:
    done = sweep(tmp_path / "s", settings={"selection": "best_validation", "rounds": 3}).run()[0]
    assert done.chosen is not None
    trial, final = RunFolder(done.chosen.trial.folder).metrics(), RunFolder(done.outcomes[0]["run"]).metrics()
    chosen_by_trial, told = ({line["selected_round"] for line in lines if "selected_round" in line} for lines in (trial, final))
    assert told == chosen_by_trial and 0 not in told


def test_failed_trials_are_recorded_and_never_chosen(tmp_path: Path) -> None:
    axes = [Axis("lr", (1e30, 0.1, 1e-6))]
    one = sweep(tmp_path / "s", axes=axes).run()[0]
    assert one.scores[0].validation is None and "loss became" in one.scores[0].problem
    assert one.chosen is one.scores[1]
    again = Counting()
    sweep(tmp_path / "s", axes=axes, callbacks=[again]).run()
    assert again.rounds == 0
    hopeless = sweep(tmp_path / "h", axes=[Axis("lr", (1e30,))]).run()[0]
    assert hopeless.chosen is None and "All trials failed" in hopeless.problem


def test_a_method_that_cannot_run_does_not_stop_the_others(tmp_path: Path) -> None:
    first, second = sweep(tmp_path / "s", ["fedbn + group_norm(groups=2)", "fedavg"]).run()
    assert first.problem and not first.outcomes and second.outcomes and not second.problem


def test_data_without_validation_needs_hold_out(tmp_path: Path) -> None:
    data = toy(validation=False)
    with pytest.raises(DataError, match=r"2 of 2 clients .* --hold-out"):
        sweep(tmp_path / "s", data=data).run()
    one = sweep(tmp_path / "s", data=data, hold_out=0.25).run()[0]
    assert one.chosen is not None and one.chosen.trial.values == {"lr": 0.02}
    held = with_validation(data, 0.25, seed=0)
    for before, after in zip(data.domains, held.domains, strict=True):
        assert after.validation is not None
        assert torch.bincount(after.validation.labels).tolist() == [4, 4, 4]
        images = torch.cat([after.train.batch(slice(None))[0], after.validation.batch(slice(None))[0]]).flatten(1)
        assert sorted(images.tolist()) == sorted(before.train.batch(slice(None))[0].flatten(1).tolist())
    trained_on = RunFolder(one.outcomes[0]["run"]).document()["data"]["training_samples"]
    assert trained_on == 2 * 48  # the final run has everything
    with pytest.raises(SettingError, match="already has validation data"):
        with_validation(toy(), 0.1, seed=0)
    with pytest.raises(SettingError, match="between 0 and 1"):
        with_validation(data, 1.5, seed=0)


def test_held_out_examples_keep_patients_together() -> None:
    data = toy(validation=False)
    patients = [torch.arange(len(domain.train)) % 6 for domain in data.domains]
    with_patients = replace(data, domains=tuple(replace(d, groups=g) for d, g in zip(data.domains, patients, strict=True)))
    for before, groups, after in zip(data.domains, patients, with_validation(with_patients, 0.3, seed=0).domains, strict=True):
        of_image = dict(zip(map(tuple, before.train.batch(slice(None))[0].flatten(1).tolist()), groups.tolist(), strict=True))
        parts = [after.train, after.validation]
        train, held = (
            {of_image[tuple(x)] for x in part.batch(slice(None))[0].flatten(1).tolist()} for part in parts if part is not None
        )
        assert train and held and not train & held


def proposals(axes: list[Axis], text: str = "fedavg", start: Any = (), sampler: str = "tpe", seed: int = 0) -> Proposals:
    return Proposals(text, axes, start, sampler, seed)


def told(found: Proposals, count: int) -> list[Any]:
    """Return the first proposals, scored by the distance of their learning rate to 0.1."""
    tried = []
    for _ in range(count):
        values, trial = found.ask()
        found.tell(trial, -abs(math.log10(values["lr"]) + 1))
        tried.append(values)
    return tried


def test_a_grid_comes_first_and_smaller_ones_are_made_up_to_the_same_number(tmp_path: Path) -> None:
    axes = [Axis("lr", (0.01, 0.1)), Axis("fedprox.mu", (0.1, 1.0, 10.0))]
    assert len(grid(axes)) == 6 and grid(axes)[1] == {"lr": 0.01, "fedprox.mu": 1.0}
    assert trials_of_each(["fedavg", "fedprox"], axes, None) == 6
    assert told(proposals(axes, "fedprox", grid(axes)), 6) == grid(axes)
    tried = told(proposals(axes[:1], "fedavg", grid(axes[:1])), 6)
    assert tried[:2] == [{"lr": 0.01}, {"lr": 0.1}]
    rates = [values["lr"] for values in tried]
    assert len(set(rates)) == 6 and all(0.01 <= rate <= 0.1 for rate in rates)
    with pytest.raises(SettingError, match=r"fewer combinations \(1\) than trials \(3\)"):
        trials_of_each(["fedavg", "fedprox"], [Axis("lr", (0.1,)), axes[1]], None)
    with pytest.raises(SettingError, match=r"fedavg has fewer combinations \(2\) than trials \(8\).* Widen the --lr range"):
        trials_of_each(["fedavg"], [Axis("lr", (0.1, 0.101))], 8)


def test_random_rates_are_log_uniform_seeded_and_the_same_for_all_methods(tmp_path: Path) -> None:
    axis = Axis("lr", (1e-4, 1.0, 0.01))
    found = {text: told(proposals([axis], text, sampler="random"), 60) for text in ("fedavg", "fedbn")}
    assert found["fedavg"] == found["fedbn"]
    assert found["fedavg"][:3] != told(proposals([axis], sampler="random", seed=2), 3)
    logs = [math.log10(values["lr"]) for values in found["fedavg"]]
    for low in range(-4, 0):  # every decade has a quarter: 15 +- 4 standard deviations
        assert 2 <= sum(low <= value < low + 1 for value in logs) <= 28
    choices = proposals([Axis("momentum", (0.0, 0.5, 0.9))])
    assert sorted(choices.ask()[0]["momentum"] for _ in range(3)) == [0.0, 0.5, 0.9]  # no value comes twice


def test_tpe_learns_from_the_trials_before_and_nothing_else() -> None:
    axes = [Axis("lr", (1e-4, 10.0))]
    tpe, random = (told(proposals(axes, sampler=sampler), 24)[8:] for sampler in ("tpe", "random"))
    distance = [sum(abs(math.log10(values["lr"]) + 1) for values in found) for found in (tpe, random)]
    assert distance[0] < 0.7 * distance[1]
    axes = [Axis("lr", (1e-3, 1.0)), Axis("momentum", (0.0, 0.5, 0.9))]
    assert told(proposals(axes), 9) == told(proposals(axes), 9)


def test_rungs_stop_what_is_behind() -> None:
    assert rungs(90) == [10, 30] and rungs(2) == [1] and rungs(1) == []
    found = proposals([Axis("lr", (1e-3, 1.0))])
    verdicts = []
    for value in (0.5, 0.4, 0.3, 0.6, 0.55):
        _, trial = found.ask()
        verdicts.append(is_behind(trial, 0, value))
        found.tell(trial, None if verdicts[-1] else value, stopped=verdicts[-1])
    assert verdicts == [False, True, True, False, True]  # one in three continues


@pytest.mark.parametrize("kill_at", [0, pytest.param(7, marks=pytest.mark.slow)])
def test_halving_spends_the_same_rounds_on_every_method_and_survives_a_kill(tmp_path: Path, kill_at: int) -> None:
    more: dict[str, Any] = {"trials": 4, "halving": True, "settings": {"rounds": 3, "checkpoint_every": "1"}}
    axes = [Axis("lr", (0.005, 0.1))]
    if kill_at:
        with pytest.raises(Killed):
            sweep(tmp_path / "s", ["fedavg", "fedbn"], axes, callbacks=[Counting(kill_at)], **more).run()
    done = sweep(tmp_path / "s", ["fedavg", "fedbn"], axes, **more).run()
    document = (tmp_path / "s" / "sweep.json").read_text()
    for one in done:
        assert 10 <= one.rounds <= 12 and len(one.scores) > 4
        stopped = [score for score in one.scores if score.stopped]
        assert stopped and all(score.stopped == 1 for score in stopped)
        assert one.chosen is not None and one.chosen.stopped is None
    if not kill_at:
        again = Counting()
        sweep(tmp_path / "s", ["fedavg", "fedbn"], axes, callbacks=[again], **more).run()
        assert again.rounds == 0 and results(tmp_path / "s")[0]["trials"] == json.loads(document)["methods"][0]["trials"]
        return
    whole = sweep(tmp_path / "other", ["fedavg", "fedbn"], axes, **more).run()
    assert [[score.trial.values for score in one.scores] for one in done] == [
        [score.trial.values for score in one.scores] for one in whole
    ]
    found = json.loads(document)
    assert found["halving"] and found["methods"][0]["trials"][1]["stopped_after"] in (1, None)


def test_methods_of_a_search_have_settings_of_their_own(tmp_path: Path) -> None:
    texts = "fedavg; fedavg with momentum=0.5, schedule=cosine"
    plain, own = sweep(tmp_path / "s", texts, [Axis("lr", (0.02,))]).run()
    assert own.chosen is not None and plain.chosen is not None
    assert (own.chosen.trial.settings.momentum, own.chosen.trial.settings.schedule) == (0.5, "cosine")
    assert (plain.chosen.trial.settings.momentum, plain.chosen.trial.settings.schedule) == (0.0, "constant")
    assert own.own == {"momentum": 0.5, "schedule": "cosine", "lr": 0.02}
    with pytest.raises(SettingError, match=r"lr is searched and also set for fedbn \(fedbn with lr=0.1\)"):
        sweep(tmp_path / "t", ["fedavg", "fedbn with lr=0.1"])


def test_a_search_is_a_table_in_python(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    found = sweep(tmp_path / "s", ["fedavg", "fedbn"], [Axis("lr", (0.001, 0.1))])
    found.run()
    table = found.table()
    assert list(table.columns) == ["method", "lr", "validation", "chosen"] and len(table) == 4
    assert (table.groupby("method")["chosen"].sum() == 1).all()
    best = table.loc[table.groupby("method")["validation"].idxmax()]
    assert (best["validation"] == table[table["chosen"]].groupby("method")["validation"].max().to_numpy()).all()
    shown = found._repr_html_()
    assert shown.count("<td>chosen</td>") == 2 and "<th>validation, %</th>" in shown and "test mean" in shown


def test_options_of_parts_are_replaced_and_checked() -> None:
    method = with_option(parse("fedbn + agc(clip=1.0, eps=0.01)"), "agc", "clip", 0.5)
    assert str(method) == str(parse("fedbn + agc(clip=0.5, eps=0.01)"))
    settings = applied(SETTINGS, "fedavg + group_norm", {"lr": 0.3, "group_norm.groups": 2, "momentum": 0.9})
    assert (settings.method, settings.lr, settings.momentum) == ("fedavg + group_norm(groups=2)", 0.3, 0.9)
    for axes, error, words in (
        ([], SettingError, "Nothing to search"),
        ([Axis("rounds", (1, 2))], SettingError, "same length"),
        ([Axis("seed", (1, 2))], SettingError, "cannot be searched"),
        ([Axis("lrr", (1.0,))], SettingError, "Did you mean lr"),
        ([Axis("lr", (-1.0,))], SettingError, "negative"),
        ([Axis("lr", (0.0,))], SettingError, "positive"),
        ([Axis("lr", (0.1,)), Axis("lr", (0.2,))], SettingError, "twice"),
        ([Axis("fedprx.mu", (1.0,))], SettingError, "Did you mean fedprox"),
        ([Axis("fedprox.muu", (1.0,))], OptionError, "Did you mean mu"),
        ([Axis("fedprox.mu", ("a",))], OptionError, "must be float"),
    ):
        with pytest.raises(PolyfedError, match=words) as caught:
            check_axes(axes, [*candidates(["fedavg", "fedprox"]).values()], SETTINGS)
        assert isinstance(caught.value, error)


def test_the_command_reports_the_whole_grid_and_what_was_chosen(polyfed: Command, images: Path) -> None:
    base = ("sweep", images, "--rounds", "1", "--batch-size", "4", "--model", "small_cnn(width=4)", "--out", "s")
    command = (*base, "--methods", "fedavg; fedprox", "--lr", "0.001,0.05", "--set-grid", "fedprox.mu=0.1,1.0", "--seeds", "2")
    done = polyfed(*command)
    assert done.code == 0, done.err
    assert done.out.count("<--") == 2 and "4 trials per method" in done.out and "test results of the best" in done.out
    assert done.err.count("validation") == 8 and done.err.count("test: accuracy: mean") == 4
    told = polyfed(*command, "--json", "-q").json
    assert told["searched"] == {"lr": [0.001, 0.05], "fedprox.mu": [0.1, 1.0]}
    assert [len(one["trials"]) for one in told["methods"]] == [4, 4]
    for one in told["methods"]:
        best = max(trial["validation"] for trial in one["trials"])
        assert one["chosen"]["validation"] == best and len(one["tests"]) == 2
        assert all(test["metric"] == "accuracy" and test["headline"]["mean"] == test["accuracy"]["mean"] for test in one["tests"])
        assert all((Path("s") / trial["run"] / "run.toml").is_file() for trial in one["trials"])
    assert len(told["tests"][1]["accuracy"]["mean"]["values"]) == 2
    says(polyfed(*base, "--methods", "fedavg"), "Nothing to search")
    says(polyfed(*base, "--methods", "fedavg", "--lr", "fast"), "--lr must be a comma-separated list of numbers")
    says(polyfed(*base, "--methods", "fedavg", "--set-grid", "momentum"), "key=v1,v2")
    assert "cannot be 'adm'" in polyfed(*base, "--methods", "fedavg", "--set-grid", "optimizer=sgd,adm").err


def test_the_final_runs_can_be_resumed_by_their_folder_alone(polyfed: Command, images: Path) -> None:
    base = ("sweep", images, "--rounds", "1", "--batch-size", "4", "--model", "small_cnn(width=4)", "--out", "s")
    told = polyfed(*base, "--methods", "fedbn", "--lr", "0.05", "--json", "-q").json
    (test,) = told["methods"][0]["tests"]
    assert polyfed("digest", test["run"]).out.split()[0] == test["digest"]
    assert polyfed("resume", test["run"], "--json", "-q").json["digest"] == test["digest"]
