"""A node builds the model that the server builds: the variant that suits the method, with images as its weights want them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'polyfed[flower]'")

from polyfed.core.data_types import DataSet
from polyfed.data.registry import data_sets
from polyfed.flower.node import PARTITION, Workplace
from polyfed.runs.experiment import Experiment
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
    import dataclasses

    build = data_sets.build

    def with_another_model(text: str, **context: object) -> DataSet:
        return dataclasses.replace(build(text, **context), default_model="hfedf_cnn")

    monkeypatch.setattr(data_sets, "build", with_another_model)
    place = same_as_server(Settings(data=f'image_folder(root="{folder}", size=8)', method="fedbn", batch_size=4))
    assert place.made is not None and place.made.batch_norms


def test_images_as_the_weights_want_them(folder: Path) -> None:
    pytest.importorskip("timm", reason="needs the extra polyfed[models]")
    model = "efficientnet_lite0"
    place = same_as_server(Settings(data=f'image_folder(root="{folder}", size=32)', model=model, batch_size=4))
    assert place.made is not None and place.made.preparation.mean == (127 / 255,) * 3
