"""The ledger: records of real runs, identities, marks, diverged runs, and invalid records."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from helpers.records import made_record
from polyfed.errors import RunFolderError
from polyfed.papers.analyses import present
from polyfed.papers.ledger import Ledger, Record, identity_of, marks_of, read_record, record_from, write_record
from polyfed.papers.recording import command_of, train_recorded
from polyfed.runs.folder.final_files import read_answers
from polyfed.runs.folder.manifest import newest_notes
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.settings import Settings

SETTINGS = Settings(
    data="digits-mini(per_domain=40)", method="fedbn", rounds=3, evaluate_last=3, selection="best_validation", seed=1
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture(scope="module")
def record(folder: Path) -> Record:
    return train_recorded(SETTINGS, folder / "runs", ["norm-statistics", "model-spread", "features"])


def lines_of(folder: Path) -> tuple[RunFolder, list[dict[str, object]]]:
    (path,) = (folder / "runs").glob("digits-mini-fedbn-*/*/run.toml")
    run = RunFolder(path.parent)
    return run, run.metrics()


def test_a_record_comes_back_as_it_was_and_is_small(record: Record, folder: Path) -> None:
    path = write_record(folder / "ledger", record)
    assert path.stat().st_size < 40_000 and path.name == f"{identity_of(SETTINGS)}-seed1.json"
    back = read_record(path)
    assert back.as_json() == json.loads(json.dumps(record.as_json()))
    assert back.full_settings == dataclasses.replace(SETTINGS, method="fedbn") and back.state == "finished"
    assert write_record(folder / "ledger", record) == path, "the same digest again is accepted"


def test_numbers_are_those_of_the_run_folder(record: Record, folder: Path) -> None:
    run, lines = lines_of(folder)
    selected = {str(line["domain"]): line for line in lines if line["view"] == "selected_seen"}
    assert {one["domain"]: one["accuracy"] for one in record.scores} == {
        domain: pytest.approx(line["accuracy"], abs=1e-6) for domain, line in selected.items()
    }
    validation = [line for line in lines if line["view"] == "validation"]
    by_round = [np.mean([float(str(line["accuracy"])) for line in validation if line["round"] == number]) for number in (1, 2, 3)]
    assert record.validation["rounds"] == [1, 2, 3] and record.validation["accuracy"] == pytest.approx(by_round, abs=1e-4)
    assert record.selected_round == 1 + int(np.argmax(by_round))
    pen = next(one for one in record.by_round["scores"] if one["domain"] == "pen")
    tested = [line["accuracy"] for line in lines if line["view"] == "seen" and line["domain"] == "pen"]
    assert pen["accuracy"] == pytest.approx(tested, abs=1e-4) and len(tested) == 3
    answers = read_answers(run, newest_notes(run.checkpoints.folder))
    right = record.is_right()
    assert right.keys() == answers.keys()
    for key, bits in right.items():
        assert bits.tolist() == (answers[key]["labels"] == answers[key]["answers"]).tolist()
        assert bits.mean() == pytest.approx(selected[key[2]]["accuracy"])


def test_no_test_score_is_in_the_validation_curve_and_no_path_in_the_record(record: Record, folder: Path) -> None:
    assert set(record.validation) <= {"rounds", "accuracy", "balanced_accuracy"}
    assert str(folder) not in json.dumps(record.as_json()) and record.command.endswith("--seed 1 --root DATA")
    assert "root" not in record.settings


def test_the_command_repeats_the_settings() -> None:
    settings = Settings(
        data="pacs(size=32)", method="fedbn + agc(clip=1.28)", unseen=("photo",), lr=0.1, root="/home/ann/data", amp="bfloat16"
    )
    words = command_of(settings)
    assert words == (
        "polyfed run 'pacs(size=32)' --method 'fedbn + agc(clip=1.28)' --unseen photo --lr 0.1 --amp bfloat16 --seed 0 --root DATA"
    )


def test_analyses_are_drawn_from_the_record(record: Record, folder: Path) -> None:
    back = read_record(write_record(folder / "ledger", record))
    found, skipped = present("norm-statistics", {"FedBN": back.analyses["norm-statistics"]})
    assert found is not None and not skipped and set(found.figures) == {"distance", "channels", "channels of all layers"}
    curves = found.figures["channels"].axes[0].lines
    channels = back.analyses["norm-statistics"]["drawn"]["channels"]
    layer = list(channels["pen"])[-2]
    assert curves[0].get_ydata() == pytest.approx(channels["pen"][layer][0])
    between = [
        row for row in found.tables["distances"] if row["source"] == "trained" and "server" not in (row["one"], row["other"])
    ]
    assert found.numbers["client and client"]["FedBN"] == pytest.approx(np.mean([row["shift"] for row in between]), rel=1e-3)
    spread, _ = present("model-spread", {"one": back.analyses["model-spread"], "two": back.analyses["model-spread"]})
    assert spread is not None and "spread" in spread.figures and spread.numbers["as tested"]["one"] > 0
    features, _ = present("features", {"FedBN": back.analyses["features"]})
    assert features is not None and not features.figures and 0 < features.numbers["client and client"]["FedBN"] <= 1


def test_a_run_that_ends_in_nan_is_a_record(folder: Path) -> None:
    settings = dataclasses.replace(SETTINGS, method="fedavg + no_norm", lr=1e12, seed=0)
    found = train_recorded(settings, folder / "runs")
    assert (found.state, found.rounds, found.digest) == ("diverged", 1, "") and not found.scores
    assert "nan" in found.error or "clients sent a valid reply" in found.error
    back = read_record(write_record(folder / "ledger", found))
    assert back.state == "diverged" and train_recorded(settings, folder / "runs").error == found.error


def test_identity_does_not_depend_on_seed_machine_or_defaults_that_are_written_out() -> None:
    one = identity_of(SETTINGS)
    same = (SETTINGS, dataclasses.replace(SETTINGS, seed=7, root="/home/ann", workers="2"))
    assert {identity_of(each) for each in same} == {one}
    written = "fedwon(gamma=1.0) + agc(clip=1.28)"
    assert identity_of(Settings(method=written)) == identity_of(Settings(method="fedwon + agc(clip=1.28)"))
    for change in ({"rounds": 4}, {"amp": "bfloat16"}, {"lr": 0.1}, {"method": "fedavg"}, {"selection": "last"}):
        assert identity_of(dataclasses.replace(SETTINGS, **change)) != one  # type: ignore[arg-type]


def test_a_cell_takes_the_group_with_the_most_seeds_and_never_mixes() -> None:
    exact = [made_record("fedbn", 0, 0.5)]
    half = [made_record("fedbn", seed, 0.6, amp="bfloat16", layout="channels_last") for seed in (0, 1)]
    wanted = Settings(method="fedbn")
    found = Ledger([*exact, *half]).find(wanted)
    assert list(found) == [0, 1] and marks_of(found[0], wanted) == ("bfloat16", "channels_last")
    found = Ledger([*exact, half[0]]).find(wanted)
    assert list(found.values()) == exact and marks_of(found[0], wanted) == ()
    assert Ledger(half).find(Settings(method="fedbn", lr=0.1)) == {}
    assert list(Ledger(exact).exact(wanted)) == [0] and not Ledger(half).exact(wanted)


def test_runs_that_differ_in_scored_rounds_only_are_one_group() -> None:
    before = [made_record("fedbn", seed, 0.5) for seed in (0, 1, 2)]
    after = [made_record("fedbn", seed, 0.6, evaluate_every=5) for seed in (2, 3)]
    found = Ledger([*before, *after]).find(Settings(method="fedbn", evaluate_every=5))
    assert {seed: record.scores[0]["accuracy"] for seed, record in found.items()} == {0: 0.5, 1: 0.5, 2: 0.6, 3: 0.6}
    found = Ledger([*before, *after]).find(Settings(method="fedbn"))
    assert found[2].scores[0]["accuracy"] == 0.5 and len(found) == 4
    chosen = [Settings(method="fedbn", selection="best_validation", evaluate_last=last) for last in (0, 10)]
    assert identity_of(chosen[0]) == identity_of(chosen[1]), "the four shared runs and their next seeds"


def test_last_rounds_may_stand_for_means_of_last_rounds_with_a_mark_but_not_for_a_chosen_round() -> None:
    last = made_record("fedbn", 0, 0.5)
    mean = Settings(method="fedbn", selection="mean_last(10)")
    assert list(Ledger([last]).find(mean)) == [0] and marks_of(last, mean) == ("last round only",)
    assert not Ledger([last]).find(Settings(method="fedbn", selection="best_validation"))
    chosen = made_record("fedbn", 0, 0.5, selection="best_validation")
    assert list(Ledger([chosen]).find(Settings(method="fedbn", selection="best_validation", evaluate_last=10))) == [0]
    assert not Ledger([chosen]).find(Settings(method="fedbn", selection="best_validation", evaluate_every=5))


def test_another_digest_of_the_same_run_is_rejected(tmp_path: Path) -> None:
    record = made_record("fedbn", 0, 0.5)
    write_record(tmp_path, record)
    before = (tmp_path / record.file).read_bytes()
    with pytest.raises(RunFolderError, match="Determine which one is correct"):
        write_record(tmp_path, dataclasses.replace(record, digest="f" * 12))
    with pytest.raises(RunFolderError, match="Determine which one is correct"):
        write_record(tmp_path, made_record("fedbn", 0, math.nan))
    assert (tmp_path / record.file).read_bytes() == before
    with pytest.raises(RunFolderError, match="are records of the same run"):
        Ledger([record, dataclasses.replace(record, identity="other")])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "its format is not 1"),
        ({"scroes": []}, "unknown entry 'scroes'"),
        ({"digest": None}, "digest is None"),
        ({"seed": "0"}, "seed is '0'"),
        ({"state": "half"}, "its state is 'half'"),
        ({"settings": {}}, "no selection"),
        ({"settings": {"selection": "last", "lrr": 1}}, "unknown setting 'lrr'"),
        ({"command": "polyfed run --root /home/ann/data"}, "contains a local folder"),
        ({"error": "no file ~/data/pacs"}, "contains a local folder"),
        ({"validation": {"rounds": [1, 2], "accuracy": [0.1]}}, "must be a list of 2 numbers"),
        ({"validation": {"rounds": [1], "seen": [{"a": 0.1}]}}, "validation seen"),
        ({"by_round": {"rounds": [1, 2], "scores": [{"accuracy": [0.1]}]}}, "does not have 2 rounds"),
        ({"right": [{"view": "seen"}]}, "right is incomplete"),
    ],
)
def test_the_reader_is_strict(change: dict[str, object], words: str) -> None:
    document = json.loads(json.dumps(made_record("fedbn", 0, 0.5).as_json()))
    record_from(document, "a.json")
    with pytest.raises(Exception, match=words):
        record_from({**document, **change}, "a.json")


def test_a_missing_entry_or_a_wrong_name_is_an_error(tmp_path: Path) -> None:
    record = made_record("fedbn", 0, 0.5)
    document = {name: value for name, value in record.as_json().items() if name != "commit"}
    with pytest.raises(RunFolderError, match="commit is missing"):
        record_from(json.loads(json.dumps(document)), "a.json")
    path = write_record(tmp_path, record)
    path.rename(tmp_path / "other.json")
    with pytest.raises(RunFolderError, match="Rename the file"):
        Ledger.read(tmp_path)
    (tmp_path / "other.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"other\.json is not a valid run record"):
        Ledger.read(tmp_path)
