"""Learning rate, optimizer and batch size declared by data sets and models: precedence, records and messages."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import polyfed
from helpers import tiny_runs
from polyfed.core.data_types import Federation, TrainsWith
from polyfed.data.registry import data_sets
from polyfed.flower.app import read_settings, settings_text
from polyfed.runs.callbacks.training_metrics import initial_loss
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.training_settings import describe_training, with_declared, with_declared_by_name
from polyfed.setting_facts import Unset
from polyfed.settings import Settings
from polyfed.studies.compare.compare import ComparedRuns
from polyfed.studies.compare.estimate import Estimator
from polyfed.studies.report.commands import command
from polyfed.studies.report.run_record import RunRecord
from polyfed.testing import TinyNet, tiny_federation

SGD = TrainsWith(lr=0.02, batch_size=6)
ADAM = TrainsWith(lr=0.001, optimizer="adam", batch_size=8)
SHORT: dict[str, Any] = {"rounds": 1, "local_steps": 1}


def declaring(declared: TrainsWith | None) -> Federation:
    return dataclasses.replace(tiny_federation(), trains_with=declared)


def chosen(declared: TrainsWith | None, **given: Any) -> tuple[tuple[float, str, int], dict[str, str]]:
    settings, origins = with_declared(Settings(**given), declaring(declared), TinyNet())
    assert not any(isinstance(value, Unset) for value in dataclasses.astuple(settings))
    return (settings.lr, settings.optimizer, settings.batch_size), origins


def test_what_is_declared_is_used_and_what_is_given_wins() -> None:
    assert chosen(None) == ((0.05, "sgd", 32), {"lr": "default", "optimizer": "default", "batch_size": "default"})
    assert chosen(SGD) == ((0.02, "sgd", 6), {"lr": "tiny", "optimizer": "tiny", "batch_size": "tiny"})
    assert chosen(SGD, lr=0.05)[0] == (0.05, "sgd", 6)
    assert chosen(SGD, lr=0.05, batch_size=32) == (
        (0.05, "sgd", 32),
        {"lr": "given", "optimizer": "default", "batch_size": "given"},
    )


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, (0.001, "adam", 8)),
        ({"lr": 0.1}, (0.1, "sgd", 8)),
        ({"optimizer": "sgd"}, (0.05, "sgd", 8)),
        ({"momentum": 0.9}, (0.05, "sgd", 8)),
        ({"optimizer": "adam", "lr": 0.01}, (0.01, "adam", 8)),
        ({"batch_size": 2}, (0.001, "adam", 2)),
    ],
)
def test_a_declared_rate_comes_with_its_optimizer_or_not_at_all(given: dict[str, Any], used: tuple[float, str, int]) -> None:
    assert chosen(ADAM, **given)[0] == used


def test_a_model_declares_for_data_that_do_not() -> None:
    for model in ("hfedf_cnn", 'hfedf_cnn(norm="batch")'):
        settings, origins = with_declared(Settings(model=model), declaring(None))
        assert settings.lr == 0.002 and origins["lr"] == "hfedf_cnn"
        settings, origins = with_declared(Settings(model=model), declaring(SGD))
        assert settings.lr == 0.02 and origins["lr"] == "tiny"
    assert with_declared(Settings(model="small_cnn"), declaring(None))[0].lr == 0.05


def test_settings_that_are_not_given_are_known_from_equal_ones_that_are() -> None:
    assert Settings() == Settings(lr=0.05, optimizer="sgd", batch_size=32)
    assert hash(Settings()) == hash(Settings(lr=0.05, optimizer="sgd", batch_size=32))
    kept = dataclasses.replace(Settings(), rounds=3)
    assert isinstance(kept.lr, Unset) and not isinstance(dataclasses.replace(kept, lr=0.05).lr, Unset)
    assert json.loads(settings_text(Settings())) == json.loads(settings_text(Settings(lr=0.05, optimizer="sgd", batch_size=32)))


def test_digits_mini_keeps_its_rate_with_every_model() -> None:
    for model in (None, "hfedf_cnn", "six_layer_cnn"):
        settings = Experiment(Settings(data="digits-mini(per_domain=20)", model=model, rounds=1)).settings
        assert (settings.lr, settings.optimizer, settings.batch_size) == (0.05, "sgd", 32)


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("digits-five", (0.1, "sgd", 32)),
        ("office-caltech10(size=64)", (0.01, "sgd", 32)),
        ("pacs", (0.002, "sgd", 32)),
        ("fed-isic2019", (0.005, "sgd", 64)),
        ("cityscapes", (0.001, "adam", 8)),
        ("./my_images", (0.05, "sgd", 32)),
    ],
)
def test_an_app_is_deployed_with_what_its_data_set_declares(name: str, used: tuple[float, str, int]) -> None:
    settings = read_settings(settings_text(with_declared_by_name(Settings(data=name))))
    assert (settings.lr, settings.optimizer, settings.batch_size) == used


def test_every_declaration_is_valid() -> None:
    declared = [
        data_sets.find(name).extra["declaration"] for name in data_sets.names() if "declaration" in data_sets.find(name).extra
    ]
    found = [one.trains_with for one in declared if one.trains_with is not None]
    assert len(found) > 5
    for one in found:
        Settings(lr=one.lr, optimizer=one.optimizer, batch_size=one.batch_size)


def test_a_run_records_values_and_origins_and_opens_with_them(tmp_path: Path) -> None:
    made = polyfed.run(declaring(SGD), "fedavg", TinyNet, batch_size=4, out=tmp_path / "run", **SHORT)
    document = RunFolder(tmp_path / "run").document()
    assert document["settings"]["lr"] == 0.02 and document["settings"]["batch_size"] == 4
    assert document["origins"] == {"lr": "tiny", "optimizer": "tiny", "batch_size": "given"}
    words = "lr 0.02, sgd: from tiny; batch 4: given"
    assert made.summary()["training"] == words
    opened = polyfed.open_run(tmp_path / "run", model=TinyNet)
    assert opened.summary()["training"] == words and opened.digest == made.digest
    assert made.digest == polyfed.run(declaring(None), "fedavg", TinyNet, lr=0.02, batch_size=4, **SHORT).digest


def test_the_methods_of_a_comparison_share_what_is_declared(tmp_path: Path) -> None:
    methods = ["fedavg", ("fedprox", {"lr": 0.3})]
    found = polyfed.compare(declaring(SGD), methods, TinyNet, out=tmp_path, **SHORT)
    assert "lr 0.02, sgd, batch 6: from tiny" in found.note
    documents = {path.parent.name.split("-")[0]: RunFolder(path.parent).document() for path in tmp_path.glob("*/run.toml")}
    assert {name: (one["settings"]["lr"], one["origins"]["lr"]) for name, one in documents.items()} == {
        "fedavg": (0.02, "tiny"),
        "fedprox": (0.3, "given"),
    }
    assert all(one["settings"]["batch_size"] == 6 for one in documents.values())


def test_an_estimate_counts_batches_of_the_declared_size() -> None:
    estimator = Estimator(Settings(rounds=2), declaring(SGD), "fedavg", TinyNet(), seconds=0.1)
    assert estimator.settings.batch_size == 6 and estimator.bench.settings.batch_size == 6


def test_words() -> None:
    assert describe_training(Settings(), {}) == "lr 0.05, sgd, batch 32"


def warnings_of(caplog: pytest.LogCaptureFixture, method: str = "fedavg", **settings: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="polyfed"):
        polyfed.run(tiny_federation(), method, tiny_runs.tiny_net, batch_size=4, **settings)
    return [record.getMessage() for record in caplog.records if "learning rate may be too high" in record.getMessage()]


def test_a_loss_above_its_start_is_said_once_and_a_rate_is_suggested(caplog: pytest.LogCaptureFixture) -> None:
    (warned,) = warnings_of(caplog, lr=3.0, rounds=3, local_epochs=3)
    assert "above the chance level (1.1)" in warned and warned.endswith("--lr 1.")
    assert not warnings_of(caplog, lr=0.05, rounds=3, local_epochs=3)


def test_a_loss_that_something_is_added_to_has_no_known_start() -> None:
    assert initial_loss(tiny_runs.built("fedavg")) == pytest.approx(1.0986, abs=1e-4)
    assert initial_loss(tiny_runs.built("fedprox(mu=1.0)")) is None
    assert initial_loss(tiny_runs.built("fedavg", loss="weighted_focal")) is None


def test_a_loss_that_is_not_finite_suggests_a_rate() -> None:
    with pytest.raises(polyfed.PolyfedError, match=r"try --lr 3.3e\+29"):
        polyfed.run(tiny_federation(), "fedavg", tiny_runs.tiny_net, lr=1e30, rounds=2, batch_size=4)


def test_a_declared_rate_does_not_go_with_an_optimizer_of_the_methods_own() -> None:
    """The data set declares a rate for SGD; Adam uses the general one, as in a run with --optimizer adam."""
    runs = ComparedRuns(Settings(), "fedavg; fedavg with optimizer=adam", data=declaring(SGD), model=TinyNet())
    assert [(run.settings.optimizer, run.settings.lr) for run in runs.runs] == [("sgd", 0.02), ("adam", 0.05)]


@pytest.mark.parametrize(("given", "written"), [({}, False), ({"lr": 0.05}, True)])
def test_the_command_of_a_run_gives_a_default_again_that_was_given(tmp_path: Path, given: dict[str, Any], written: bool) -> None:
    polyfed.run("digits-mini(per_domain=10)", model="small_cnn(width=4)", out=tmp_path / "run", **SHORT, **given)
    assert ("--lr 0.05" in command(RunRecord.from_folder(tmp_path / "run"))) == written
