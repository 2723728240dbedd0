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
import torch

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from flwr.app import Message

from helpers.command_line import CLASSES, Command, picture, says
from helpers.flower_fakes import TINY, TINY_MODEL, FakeGrid, tiny_data, virtual_nodes
from helpers.networks import same
from polyfed import open_run
from polyfed.core import evaluation
from polyfed.data.registry import data_sets
from polyfed.errors import DataError, RunFolderError, SettingError
from polyfed.flower.app import DEFAULTS, NEWCOMER
from polyfed.flower.server_app import run_on_grid
from polyfed.flower.wire.transport import Transport
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.manifest import NEWCOMER_FILE
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.runs.result import Result
from polyfed.settings import Settings

SMALL = Settings(data=TINY, model=TINY_MODEL, method="fedbn", rounds=2, batch_size=4, local_steps=3, checkpoint_every="1").trusted()
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


@pytest.mark.parametrize("method", ["local", "copa", "hfedf", "pfedhn", "fedbn"])
def test_after_deployment_every_method_has_the_newcomers_models_of_the_run_in_process(method: str, tmp_path: Path) -> None:
    settings = dataclasses.replace(SMALL, method=method, rounds=1)
    expected = models_for_newcomers(train_run(Experiment(settings), None))
    over_flower(settings, tmp_path)
    found = models_for_newcomers(open_run(taken(tmp_path)))
    assert (found.score, len(found.models)) == (expected.score, len(expected.models))
    for (weight, state), (other_weight, other) in zip(found.models, expected.models, strict=True):
        assert weight == other_weight
        assert all(torch.equal(state[name], other[name]) for name in open_run(tmp_path / "taken").experiment.bench.live)


def models_for_newcomers(result: Result) -> evaluation.Newcomer:
    experiment = result.experiment
    made: evaluation.Newcomer = experiment.exchange(
        evaluation.newcomer(experiment.server, experiment.bench, "averaged", lambda: iter(()))
    )
    return made


def test_a_damaged_file_of_newcomers_is_named(tmp_path: Path) -> None:
    over_flower(dataclasses.replace(SMALL, method="local", rounds=1), tmp_path)
    data = (tmp_path / "run" / NEWCOMER_FILE).read_bytes()
    (tmp_path / "run" / NEWCOMER_FILE).write_bytes(data.replace(b"mean_of_models", b"mean_of_modelz"))
    with pytest.raises(RunFolderError, match=r"newcomer\.safetensors"):
        open_run(tmp_path / "run")


def test_the_run_folder_is_named_after_the_nodes_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = dataclasses.replace(SMALL, data="digits-mini", rounds=1)
    grid = FakeGrid(dataclasses.replace(settings, data=TINY), tmp_path / "nodes", virtual_nodes(NODES))
    found = over_flower(settings, tmp_path, grid, out="")
    assert found.path == str(tmp_path / "runs" / "tiny-fedbn-seed0")


def test_unseen_domains_are_tested_where_the_server_has_their_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(SMALL, rounds=1)
    whole = dataclasses.replace(settings, unseen=("small",))
    expected = train_run(Experiment(whole), None)
    grid = FakeGrid(whole, tmp_path / "nodes", {n: {"data": TINY, "domain": name} for n, name in ((1, "big"), (2, "middle"))})
    found = over_flower(whole, tmp_path, grid, unseen_data=TINY)
    assert found.digest == expected.digest
    assert found.rows == expected.rows
    assert [row.domain for row in found.rows if row.view == "unseen"] == ["small"]
    with pytest.raises(SettingError, match=r"the layers that fedbn keeps at the nodes. Request them"):
        over_flower(whole, tmp_path / "refused", grid, unseen_data=TINY, newcomer_model=False)
    with caplog.at_level(logging.WARNING, "polyfed"):
        untested = over_flower(whole, tmp_path / "untested", grid)
    assert "Unseen domains (small) are not tested" in caplog.text
    assert not any(row.view == "unseen" for row in untested.rows)
    with pytest.raises(DataError, match="nodes have"):
        over_flower(dataclasses.replace(whole, unseen=()), tmp_path / "other", grid, unseen_data="digits-mini(per_domain=10)")


def test_nodes_have_as_long_to_describe_themselves_as_the_run_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    send = Transport.send
    monkeypatch.setattr(Transport, "send", lambda self, m, c, g, timeout: waited.append(timeout) or send(self, m, c, g, timeout))
    over_flower(dataclasses.replace(SMALL, rounds=1), tmp_path, describe_timeout=77.0)
    assert waited[0] == 77.0 and DEFAULTS["describe-timeout"] == 300.0


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
        with pytest.raises(DataError, match="is stored at its node"):
            found.model_for("small")


def test_what_the_newcomer_cost_is_counted(tmp_path: Path) -> None:
    over_flower(SMALL, tmp_path)
    snapshot, _ = RunFolder(tmp_path / "run").checkpoints.read()
    assert snapshot is not None and "newcomer" in snapshot.notes["costs"]["bytes"]["up"]
    assert (tmp_path / "run" / NEWCOMER_FILE).exists()
    over_flower(dataclasses.replace(SMALL, method="fedavg"), tmp_path / "shared")
    assert not (tmp_path / "shared" / "run" / NEWCOMER_FILE).exists(), "all of it is in the checkpoint"


def test_local_layers_are_asked_for_only_if_the_run_may_and_later_if_it_may_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = FakeGrid(SMALL, tmp_path / "nodes", virtual_nodes(NODES))
    with caplog.at_level(logging.INFO, "polyfed"):
        over_flower(SMALL, tmp_path, grid, newcomer_model=DEFAULTS[NEWCOMER])
    assert not [message for message in grid.asked if is_about_entries(message)]
    assert any("newcomer-model=true" in message for message in caplog.messages)
    with pytest.raises(DataError, match=f"if the run folder contains {NEWCOMER_FILE}"):
        open_run(tmp_path / "run").newcomer()
    before = len(grid.asked)
    over_flower(SMALL, tmp_path, grid)
    assert [is_about_entries(message) for message in grid.asked[before:]] == [False] * NODES + [True] * NODES
    assert same(open_run(taken(tmp_path)).newcomer(), train_run(Experiment(SMALL), None).newcomer())
    with pytest.raises(SettingError, match="newcomer-model in the run configuration must be true or false"):
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
    assert any("Could not write the newcomer model" in message for message in caplog.messages)
    assert found.digest == train_run(Experiment(SMALL), None).digest and not (tmp_path / "run" / NEWCOMER_FILE).exists()


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
    says(polyfed("predict", "run", *words, "--newcomer", "nearest"), "is stored at its node", "--newcomer averaged or re-estimated")
    says(polyfed("predict", "run", *words, "--client", "day"), "is stored at its node")
    says(polyfed("evaluate", "run", "-q"), "trained by Flower nodes", "polyfed evaluate run DATA")
    says(polyfed("resume", "run", "-q"), "trained by Flower nodes")
    with pytest.raises(DataError, match="trained by Flower nodes"):
        resume(tmp_path / "run")
    ended = polyfed("evaluate", "run", images, "--json")
    assert "so their domains are scored with the newcomer model" in ended.err
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
