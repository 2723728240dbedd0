"""The default model supports every requested method."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from polyfed import compare
from polyfed.backends.in_process import InProcess
from polyfed.core.data_types import ArrayExamples, ClientData, DataSet, Domain, Federation
from polyfed.core.method import methods, parse
from polyfed.errors import PolyfedError
from polyfed.runs.experiment import Experiment
from polyfed.settings import Settings
from polyfed.studies.compare.compare import ComparedRuns
from polyfed.studies.sweep.search import Sweep
from polyfed.studies.sweep.space import Axis

VARIANT = 'hfedf_cnn(norm="batch")'
NEEDS_BLOCKS = {"fixup"}
"""Methods that no variant of this network supports."""


def examples(count: int, seed: int = 0, side: int = 8) -> ArrayExamples:
    stream = torch.Generator().manual_seed(seed)
    return ArrayExamples(
        torch.randint(0, 256, (count, 3, side, side), generator=stream, dtype=torch.uint8), torch.arange(count) % 2
    )


def data() -> DataSet:
    domains = tuple(Domain(name, examples(8), examples(4, 1), examples(4, 2)) for name in ("a", "b"))
    return DataSet("two", ("no", "yes"), domains, default_model="hfedf_cnn")


def federation(side: int = 8) -> Federation:
    clients = tuple(
        ClientData(name, (name,), examples(8, 0, side), {name: examples(4, 1, side)}, examples(4, 2, side)) for name in ("a", "b")
    )
    return Federation("two", ("no", "yes"), clients, default_model="hfedf_cnn")


def plain_methods() -> list[str]:
    return [
        name for name in methods.names() if all(p.default is not p.empty for p in methods.find(name).signature.parameters.values())
    ]


@pytest.mark.parametrize("name", plain_methods())
def test_what_a_method_declares_of_batch_norm_is_true(name: str) -> None:
    """Without batch norm, exactly the methods that declare the need are rejected; with the default model none is."""
    settings = Settings(method=name, batch_size=4, rounds=4)
    try:
        Experiment(settings, federation(), model=None, backend=InProcess)
    except PolyfedError:
        assert name in NEEDS_BLOCKS
    try:
        Experiment(Settings(method=name, batch_size=4, rounds=4, model="hfedf_cnn"), federation(), backend=InProcess)
        refused = False
    except PolyfedError as error:
        refused = "batch norm" in str(error) or "batch-norm" in str(error)
    assert refused == parse(name).facts.batch_norm


def test_a_run_takes_the_variant_says_so_and_writes_it_down(tmp_path: Path) -> None:
    chosen = Experiment(Settings(method="fedbn", batch_size=4), federation(), backend=InProcess)
    assert chosen.settings.model == VARIANT
    assert any(f"Training {VARIANT} instead of" in notice for notice in chosen.notices)
    plain = Experiment(Settings(method="fedavg", batch_size=4), federation(), backend=InProcess)
    assert plain.settings.model is None and not any("batch norm" in notice for notice in plain.notices)


@pytest.mark.parametrize("default", ["lenet", 'lenet(norm="batch")', "hfedf_cnn( 'batch' )"])
def test_a_default_model_that_has_batch_norm_stays_and_nothing_is_said(default: str) -> None:
    has_it = dataclasses.replace(federation(side=16), default_model=default)
    chosen = Experiment(Settings(method="fedbn", batch_size=4), has_it, backend=InProcess)
    assert chosen.settings.model is None and chosen.notices == []
    without = dataclasses.replace(has_it, default_model='lenet(norm="none")')
    assert Experiment(Settings(method="fedbn", batch_size=4), without, backend=InProcess).settings.model == 'lenet(norm="batch")'


def test_a_comparison_has_one_model_and_names_it(tmp_path: Path) -> None:
    found = compare(data(), ["fedavg", "fedbn", "fedavg + group_norm(groups=2)"], rounds=1, batch_size=4, out=tmp_path / "c")
    assert not found.problems
    assert found.model == found.as_json()["model"] == VARIANT and f"Model: {VARIANT}." in found.note
    written = [(folder / "run.toml").read_text() for folder in sorted((tmp_path / "c").iterdir()) if folder.is_dir()]
    assert len(written) == 3 and all('model = "hfedf_cnn(norm=\\"batch\\")"' in text for text in written)


def test_a_comparison_without_the_need_keeps_the_data_sets_own_model() -> None:
    runs = ComparedRuns(Settings(data="two"), ["fedavg", "fedprox"], data=data())
    assert runs.model_name == "hfedf_cnn" and all(run.settings.model is None for run in runs.runs)
    named = ComparedRuns(Settings(data="two", model="small_cnn"), ["fedbn"], data=data())
    assert named.model_name == "small_cnn"


def test_a_search_has_one_model_too(tmp_path: Path) -> None:
    sweep = Sweep(Settings(data="two"), ["fedavg", "fedbn"], [Axis("lr", (0.1,))], tmp_path, data=data())
    assert sweep.settings.model == VARIANT
