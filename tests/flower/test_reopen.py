"""A run over Flower, used where neither the nodes nor their data are: what the server's run folder is enough for, and what is said else."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Message

from helpers.command_line import CLASSES, Command, picture, says
from helpers.flower_fakes import TINY, FakeGrid, tiny_data, virtual_nodes
from helpers.networks import same
from polyfed.data.registry import data_sets
from polyfed.errors import DataError, SettingError
from polyfed.flower.run_config import DEFAULTS, NEWCOMER
from polyfed.flower.server_app import run_on_grid
from polyfed.runs.experiment import Experiment
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.newcomer_file import FILE
from polyfed.runs.reopen import open_run
from polyfed.runs.result import Result
from polyfed.runs.run_folder import RunFolder
from polyfed.settings import Settings

SMALL = Settings(data=TINY, method="fedbn", rounds=2, batch_size=4, local_steps=3, checkpoint_every="1")
NODES = 3


@pytest.fixture(autouse=True)
def tiny() -> Iterator[None]:
    with tiny_data():
        yield


def over_flower(settings: Settings, folder: Path, grid: FakeGrid | None = None, **config: Any) -> Result:
    """A run over fake nodes, with its run folder in ``folder/run``."""
    grid = grid or FakeGrid(settings, folder / "nodes", virtual_nodes(NODES))
    told = {
        "out": str(folder / "run"),
        "min-nodes": len(grid.configs),
        "wait": 1.0,
        "timeout": 0.5,
        "patience": 0.0,
        "newcomer-model": True,
    }
    return run_on_grid(grid, settings, told | {key.replace("_", "-"): value for key, value in config.items()})  # type: ignore[arg-type]


def taken(folder: Path) -> Path:
    """The run folder on a machine that has nothing else."""
    shutil.move(folder / "run", folder / "taken")
    shutil.rmtree(folder / "nodes", ignore_errors=True)
    return folder / "taken"


@pytest.mark.parametrize("method", ["fedbn", "fedavg", "gperxan"])
def test_the_newcomer_of_a_run_over_flower_is_that_of_the_run_in_process(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(SMALL, method=method)
    expected = train_run(Experiment(settings), None)
    over_flower(settings, tmp_path)
    monkeypatch.setattr(data_sets, "build", lambda *_, **__: pytest.fail("the data were asked for"))
    found = open_run(taken(tmp_path))
    assert same(found.newcomer(), expected.newcomer())
    assert (found.digest, found.rows) == (expected.digest, expected.rows)
    if method == "fedavg":
        assert same(found.model_for("small"), expected.model_for("small"))
    else:
        with pytest.raises(DataError, match="stayed at its node"):
            found.model_for("small")


def test_what_the_newcomer_cost_is_counted(tmp_path: Path) -> None:
    over_flower(SMALL, tmp_path)
    snapshot, _ = RunFolder(tmp_path / "run").checkpoints.read()
    assert snapshot is not None and "newcomer" in snapshot.notes["costs"]["bytes"]["up"]
    assert (tmp_path / "run" / FILE).exists()
    over_flower(dataclasses.replace(SMALL, method="fedavg"), tmp_path / "shared")
    assert not (tmp_path / "shared" / "run" / FILE).exists(), "all of it is in the checkpoint"


def test_local_layers_are_asked_for_only_if_the_run_may_and_later_if_it_may_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid(SMALL, tmp_path / "nodes", virtual_nodes(NODES))
    with caplog.at_level(logging.INFO, "polyfed"):
        over_flower(SMALL, tmp_path, grid, newcomer_model=DEFAULTS[NEWCOMER])
    assert not [message for message in grid.asked if is_about_entries(message)]
    assert any("newcomer-model=true" in message for message in caplog.messages)
    with pytest.raises(DataError, match=f"if the server left a {FILE}"):
        open_run(tmp_path / "run").newcomer()
    before = len(grid.asked)
    over_flower(SMALL, tmp_path, grid)
    assert [is_about_entries(message) for message in grid.asked[before:]] == [False] * NODES + [True] * NODES
    assert same(open_run(taken(tmp_path)).newcomer(), train_run(Experiment(SMALL), None).newcomer())
    with pytest.raises(SettingError, match="newcomer-model in the run's configuration takes true or false"):
        over_flower(SMALL, tmp_path, grid, newcomer_model="no")


def is_about_entries(message: Message) -> bool:
    return '"what": "entries"' in str(message.content["polyfed"]["control"])


def test_a_run_whose_nodes_have_gone_at_the_end_is_whole_and_says_what_it_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def meddle(asked: Message, answered: Message) -> Message | None:
        return None if is_about_entries(asked) else answered

    grid = FakeGrid(SMALL, tmp_path / "nodes", virtual_nodes(NODES), meddle)
    with caplog.at_level(logging.WARNING, "polyfed"):
        found = over_flower(SMALL, tmp_path, grid)
    assert any("There is no model for newcomers" in message for message in caplog.messages)
    assert found.digest == train_run(Experiment(SMALL), None).digest and not (tmp_path / "run" / FILE).exists()


# --------------------------------------------------------------------------------------------------------- command line
@pytest.fixture
def hospitals(images: Path, tmp_path: Path) -> FakeGrid:
    """Two nodes with a folder of images each, and a normalisation that is not the usual one."""
    settings = Settings(method="fedbn", rounds=2, batch_size=8, local_steps=3)
    data = f'image_folder(root="{images}", size=16, normalise="imagenet")'
    configs = {number: {"data": data, "domain": domain} for number, domain in enumerate(("day", "night"), 1)}
    return FakeGrid(settings, tmp_path / "nodes", configs)


def test_predict_and_evaluate_work_on_a_run_over_flower(
    polyfed: Command, hospitals: FakeGrid, images: Path, tmp_path: Path
) -> None:
    data = str(hospitals.configs[1]["data"])
    expected = train_run(Experiment(dataclasses.replace(hospitals.settings, data=data)), RunFolder(tmp_path / "in-process"))
    over_flower(hospitals.settings, tmp_path, hospitals)
    for label in CLASSES:
        picture(label, False, np.random.default_rng(5)).resize((16, 16)).save(tmp_path / f"{label}.png")
    words = ("disk.png", "stripe.png", "--json", "-q")
    assert polyfed("predict", "run", *words).json["predictions"] == polyfed("predict", "in-process", *words).json["predictions"]
    says(polyfed("predict", "run", *words, "--newcomer", "nearest"), "stayed at its node", "--newcomer averaged or re-estimated")
    says(polyfed("predict", "run", *words, "--client", "day"), "stayed at its node")
    says(polyfed("evaluate", "run", "-q"), "trained by Flower nodes", "polyfed evaluate run DATA")
    says(polyfed("resume", "run", "-q"), "trained by Flower nodes")
    with pytest.raises(DataError, match="trained by Flower nodes"):
        resume(tmp_path / "run")
    ended = polyfed("evaluate", "run", images, "--json")
    assert "the newcomer's model is scored on their domains too" in ended.err
    assert ended.json["accuracy"]["seen"] == {} and set(ended.json["accuracy"]["unseen"]) == {"day", "night"}
    other = polyfed("evaluate", "in-process", images, "--json", "-q").json
    assert other["accuracy"]["unseen"] == {} and set(other["accuracy"]["seen"]) == {"day", "night"} == set(
        expected.accuracy["seen"]
    )


def test_where_nothing_is_local_clients_are_scored_as_themselves(
    polyfed: Command, hospitals: FakeGrid, images: Path, tmp_path: Path
) -> None:
    hospitals.settings = dataclasses.replace(hospitals.settings, method="fedavg")
    found = over_flower(hospitals.settings, tmp_path, hospitals)
    told = polyfed("evaluate", "run", hospitals.configs[1]["data"], "--json", "-q").json
    assert told["accuracy"] == found.accuracy


def test_nodes_that_scale_their_inputs_in_other_ways_are_refused(hospitals: FakeGrid, images: Path, tmp_path: Path) -> None:
    usual = {"data": f'image_folder(root="{images}", size=16)', "domain": "night"}
    hospitals.configs = {**hospitals.configs, 2: usual}
    with pytest.raises(DataError, match="All nodes need the same normalisation"):
        over_flower(hospitals.settings, tmp_path, hospitals)
