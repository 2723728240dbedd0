"""A node builds the model that the server builds: the variant that suits the method, with images as its weights want them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from helpers.flower_fakes import FakeGrid
from polyfed.core.data_types import ArrayExamples, DataSet, Domain
from polyfed.data.federation_summary import RecordedInputs
from polyfed.data.registry import data_sets
from polyfed.errors import SettingError
from polyfed.flower.node.node import PARTITION, Workplace
from polyfed.flower.server.backend import FlowerBackend
from polyfed.flower.server.federation import federation_of
from polyfed.flower.server.roster import Roster
from polyfed.flower.server_app import run_on_grid
from polyfed.flower.wire.message import BadMessage
from polyfed.flower.wire.transport import Transport
from polyfed.runs.experiment import Experiment
from polyfed.runs.lifecycle import train_run
from polyfed.settings import Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for place in (f"{domain}/{label}/{number}.png" for domain in "ab" for label in "xy" for number in range(6)):
        (tmp_path / "own" / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / "own" / place)
    return tmp_path / "own"


def same_as_server(settings: Settings) -> Workplace:
    """A node's workplace, whose entries and preparation are the server's."""
    place, server = Workplace(settings, {PARTITION: 0}), Experiment(settings)
    bench = place.bench({"rounds": 1, "class_counts": [8, 8]})
    assert {name: value.shape for name, value in bench.initial.items()} == {
        name: value.shape for name, value in server.bench.initial.items()
    }
    assert (bench.preparation.mean, bench.preparation.std) == (server.bench.preparation.mean, server.bench.preparation.std)
    return place


def test_the_variant_that_suits_the_method(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = data_sets.build

    def with_another_model(text: str, **context: object) -> DataSet:
        return dataclasses.replace(build(text, **context), default_model="hfedf_cnn")

    monkeypatch.setattr(data_sets, "build", with_another_model)
    place = same_as_server(Settings(data=f'image_folder(root="{folder}", size=8)', method="fedbn", batch_size=4))
    assert place.built is not None and place.built.batch_norms


def test_images_as_the_weights_want_them(folder: Path) -> None:
    pytest.importorskip("timm", reason="needs the extra polyfed[models]")
    model = "efficientnet_lite0"
    place = same_as_server(Settings(data=f'image_folder(root="{folder}", size=32)', model=model, batch_size=4))
    assert place.built is not None and place.built.preparation.mean == (127 / 255,) * 3


def small_set() -> DataSet:
    def examples(count: int, seed: int) -> ArrayExamples:
        stream = torch.Generator().manual_seed(seed)
        images = torch.randint(0, 256, (count, 3, 8, 8), generator=stream, dtype=torch.uint8)
        return ArrayExamples(images, torch.arange(count) % 2)

    domains = tuple(Domain(name, examples(8, place), examples(4, place + 5)) for place, name in enumerate("ab"))
    return DataSet("small", ("no", "yes"), domains, default_model="hfedf_cnn", source="made here")


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[FakeGrid]:
    """Two nodes with data of their own, whose default model has no batch norm, and a method that needs it."""
    data_sets.add(small_set, "small_set")
    settings = Settings(data="small_set", method="fedbn", rounds=2, lr=0.05, batch_size=4, local_steps=1, checkpoint_every="1")
    try:
        yield FakeGrid(
            settings, tmp_path / "nodes", {n: {"data": "small_set", "domain": domain} for n, domain in enumerate("ab", 10)}
        )
    finally:
        del data_sets._records["small_set"]


def test_a_run_whose_model_nobody_names_is_the_same_over_nodes_and_goes_on(grid: FakeGrid, tmp_path: Path) -> None:
    config = {"out": str(tmp_path / "run"), "min-nodes": 2, "wait": 1.0}
    found = run_on_grid(grid, grid.settings, config)  # type: ignore[arg-type]
    expected = train_run(Experiment(grid.settings), None)
    assert found.digest == expected.digest and found.experiment.settings.model == 'hfedf_cnn(norm="batch")'
    assert run_on_grid(grid, grid.settings, config).digest == found.digest  # type: ignore[arg-type]
    other = dataclasses.replace(grid.settings, model="hfedf_cnn")
    with pytest.raises(SettingError, match=r"different model"):
        run_on_grid(grid, other, config)  # type: ignore[arg-type]


def test_nodes_normalise_as_the_folder_of_a_run_records(grid: FakeGrid) -> None:
    settings = dataclasses.replace(grid.settings, model='hfedf_cnn(norm="batch")')
    recorded = RecordedInputs((3, 8, 8), (0.3, 0.4, 0.5), (0.2, 0.2, 0.3))
    expected = train_run(Experiment(settings, recorded=recorded), None)
    roster = Roster(Transport(grid), timeout=5.0, patience=0.0)  # type: ignore[arg-type]
    over_nodes = Experiment(
        settings,
        federation_of(roster.gather(2, 5.0)),
        backend=lambda bench, clients: FlowerBackend(bench, clients, roster, 5.0),
        recorded=recorded,
    )
    assert train_run(over_nodes, None).digest == expected.digest


def test_a_normalisation_that_cannot_be_is_refused(grid: FakeGrid) -> None:
    for facts in ({"mean": [0.5]}, {"mean": 1, "std": 1}, {"mean": [0.5], "std": [0.0]}, {"mean": [0.5] * 2, "std": [1.0] * 2}):
        with pytest.raises(BadMessage, match="normalis"):
            Workplace(grid.settings, grid.configs[10]).bench({"rounds": 1, "class_counts": [8, 8], **facts})
