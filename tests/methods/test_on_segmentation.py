"""Every method that makes sense trains on segmentation: one round on tiny images, with finite scores and a model of its own kind."""

from __future__ import annotations

import pytest
import torch

import polyfed
from helpers.scenes import squares
from polyfed.core.data_types import DataSet
from polyfed.errors import SettingError

METHODS = (
    "fedavg",
    "fedavg + group_norm(groups=2)",
    "fedbn",
    "silobn",
    "fixbn",
    "fedwon",
    "fedstein",
    'gperxan(guide=0, tiny_maps="skip")',
    "fedprox",
    "scaffold",
    "fedavgm",
    "fednova",
)


@pytest.fixture(scope="module")
def scenes() -> DataSet:
    return squares()


@pytest.mark.parametrize("method", METHODS)
def test_methods_train_on_segmentation(method: str, scenes: DataSet) -> None:
    found = polyfed.run(scenes, method, rounds=2, batch_size=4, lr=0.05, out=None)
    table = found.table("mean_iou")
    assert set(table["seen"]) == {"night", "day"} and 0 <= table["worst"] <= table["mean"] <= 1
    assert all(row.numbers["pixels"] == 4 * 15 * 16 for row in found.rows)


def test_differential_privacy_takes_an_image_as_a_sample(scenes: DataSet) -> None:
    pytest.importorskip("opacus", reason="needs the privacy extra")
    found = polyfed.run(scenes, "fedavg + group_norm(groups=2) + dp_sgd(epsilon=8)", rounds=1, batch_size=4, lr=0.05, out=None)
    assert 7.9 < found.summary()["privacy"]["epsilon_spent"] <= 8
    assert 0 <= found.table("mean_iou")["worst"] <= 1


def test_it_learns_and_answers_with_masks(scenes: DataSet) -> None:
    found = polyfed.run(scenes, "fedbn", rounds=10, local_epochs=4, batch_size=4, lr=0.2, out=None)
    assert found.table("mean_iou")["mean"] > 0.7
    mask = found.predict(scenes.domains[0].test.batch(slice(0, 1))[0], client="night")[0].mask
    assert mask is not None and mask.shape == (16, 16)


def test_the_guide_is_refused(scenes: DataSet) -> None:
    with pytest.raises(SettingError, match="gperxan needs one class label per example, but the task is segmentation"):
        polyfed.run(scenes, 'gperxan(tiny_maps="skip")', rounds=1, out=None)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["mobilenet_v2", "resnet18", "resnet50"])
def test_deeplabv3plus_has_one_logit_per_class_and_pixel(encoder: str) -> None:
    pytest.importorskip("segmentation_models_pytorch", reason="the extra segmentation is not installed")
    from polyfed.models import models

    model = models.build(f'deeplabv3plus(encoder="{encoder}")', classes=3, input_shape=(3, 40, 50)).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 40, 50)).shape == (1, 3, 40, 50)
