"""Resumed runs: bit-identical, on the same data, and with all objects given in Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from helpers.recorded_runs import experiment_of, go_on, run_until, without_seals
from helpers.tiny_runs import tiny_net
from helpers.watching import Messages
from polyfed.core.method import Facts, Method
from polyfed.core.sharing import batch_norm, keep_local
from polyfed.data.federation_summary import FederationSummary, differences
from polyfed.errors import RunFolderError, UnknownName
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder.paths import Reopening
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import resume, train_run
from polyfed.settings import Settings
from polyfed.testing import SIZES, TinyNet, tiny_federation


def tiny_federation_as_data() -> Any:
    stream = torch.Generator().manual_seed(0)
    parts = [(torch.rand(8, 3, 8, 8, generator=stream), torch.arange(8) % 3) for _ in range(4)]
    return {"a": (parts[0], parts[1]), "b": (parts[2], parts[3])}


@pytest.mark.parametrize("method", ["fedavg", "fedbn", 'fedprox + momentum(keep="local")'])
@pytest.mark.parametrize("last", [0, 1, 3])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, method: str, last: int) -> None:
    extra = {"momentum": 0.9} if "momentum" in method else {}
    whole = train_run(experiment_of(method, evaluate_every=1, **extra), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", last, method, evaluate_every=1, **extra)
    resumed = go_on(tmp_path / "cut")
    assert resumed.digest == whole.digest
    assert resumed.accuracy == whole.accuracy
    lines = [RunFolder(tmp_path / name).metrics() for name in ("whole", "cut")]
    assert lines[0] == lines[1]
    assert resumed.experiment.costs.bytes == whole.experiment.costs.bytes


def test_a_finished_run_is_read_not_repeated(tmp_path: Path) -> None:
    whole = train_run(experiment_of(), RunFolder(tmp_path / "run"))
    again = go_on(tmp_path / "run")
    assert again.digest == whole.digest and again.accuracy == whole.accuracy


def test_lost_metrics_of_an_older_run_are_named_and_it_goes_on(tmp_path: Path) -> None:
    whole = train_run(experiment_of(), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", 3)
    without_seals(tmp_path / "cut")
    (tmp_path / "cut" / "metrics.jsonl").write_text("")
    told = Messages()
    result = resume(tmp_path / "cut", data=tiny_federation(), how=Reopening(model=tiny_net()), callbacks=[told])
    assert "metrics.jsonl has fewer lines" in told.texts[0] and result.digest == whole.digest
    assert RunFolder(tmp_path / "cut").metrics()


def test_a_method_of_python_can_be_resumed(tmp_path: Path) -> None:
    mine = Method("mine", sharing=(keep_local(batch_norm),), facts=Facts(client_state=True))
    values = {"rounds": 3, "batch_size": 4, "checkpoint_every": "1"}
    whole = train_run(Experiment(Settings(**values), tiny_federation(), mine, tiny_net()), RunFolder(tmp_path / "whole"))
    with pytest.raises(UnknownName, match="mine"):
        go_on(tmp_path / "whole")
    again = resume(tmp_path / "whole", tiny_federation(), Reopening(model=tiny_net(), method=mine))
    assert again.digest == whole.digest


def test_a_run_is_not_opened_without_what_it_was_given_in_python(tmp_path: Path) -> None:
    options: Any = {"rounds": 1, "out": tmp_path / "run"}
    polyfed.run(tiny_federation_as_data(), "fedavg", tiny_net(), **options)
    with pytest.raises(RunFolderError, match=r"data and model given in Python.*data=\.\.\., model=\.\.\."):
        resume(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"model given in Python"):
        resume(tmp_path / "run", data=tiny_federation_as_data())
    assert resume(tmp_path / "run", data=tiny_federation_as_data(), how=Reopening(model=tiny_net())).digest


FEWER = {"big": 13, "middle": 8}


OTHER_DATA = {
    "client small with 5 training samples is missing": tiny_federation(FEWER),
    "client late is new": tiny_federation(SIZES | {"late": 5}),
    "client small has 6 training samples instead of 5": tiny_federation(SIZES | {"small": 6}),
    "4 classes instead of 3": tiny_federation(classes=4),
    "the source is 'elsewhere' instead of ''": replace(tiny_federation(), source="elsewhere"),
    "unseen domains are none instead of new": replace(tiny_federation(), unseen={}),
    "the class names, or the sizes of validation or test splits, have changed": replace(tiny_federation(), classes=("a", "b", "c")),
}


@pytest.mark.parametrize("said", OTHER_DATA)
def test_a_run_does_not_go_on_with_other_data(cut_run: Path, said: str) -> None:
    with pytest.raises(RunFolderError, match=rf"has changed since the run was started: .*{said}.*another folder"):
        resume(cut_run, data=OTHER_DATA[said], how=Reopening(model=TinyNet(len(OTHER_DATA[said].classes))))


def test_of_very_many_clients_the_digest_is_known_again() -> None:
    many = {f"c{number:03d}": 3 for number in range(101)}
    then, now = (FederationSummary.of(tiny_federation(many | other)).identity() for other in ({}, {"c007": 4, "c008": 2}))
    assert "samples" not in then and differences(then, then) == []
    assert differences(then, now) == ["the class names, or the sizes of validation or test splits, have changed"]
    assert differences(then, FederationSummary.of(tiny_federation()).identity()) == [
        "3 clients instead of 101",
        "26 training samples instead of 303",
    ]


def test_a_run_stopped_after_its_last_scores_is_not_scored_twice(tmp_path: Path) -> None:
    whole = train_run(experiment_of(evaluate_every=1), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", 4, evaluate_every=1)
    resumed = go_on(tmp_path / "cut")
    assert RunFolder(tmp_path / "cut").metrics() == RunFolder(tmp_path / "whole").metrics()
    assert resumed.rows == whole.rows == go_on(tmp_path / "cut").rows
    assert resumed.experiment.costs.bytes == whole.experiment.costs.bytes


def test_openings_that_are_held_again_count_once(tmp_path: Path) -> None:
    whole = train_run(experiment_of("elcfs", rounds=1), RunFolder(tmp_path / "whole"))
    run_until(tmp_path / "cut", 0, "elcfs", rounds=1)
    resumed = go_on(tmp_path / "cut")
    assert resumed.digest == whole.digest
    assert resumed.experiment.costs.once == whole.experiment.costs.once != 0
