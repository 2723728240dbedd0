"""A reopened run reads and normalises images as in training, even if the defaults of its weights have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import polyfed
from helpers.watching import AfterRound
from polyfed.core.data_types import ArrayExamples, DataSet, Domain, Preparation
from polyfed.data.federation_summary import FederationSummary, differences
from polyfed.errors import DataError, RunFolderError
from polyfed.models import models
from polyfed.models.model_text import as_call
from polyfed.runs import assemble, experiment
from polyfed.runs.callbacks.callback import RunState
from polyfed.runs.experiment import Experiment
from polyfed.runs.export import metadata
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import train_run
from polyfed.runs.reopen import open_experiment
from polyfed.settings import Settings
from polyfed.studies.analyse.leakage import pool_of, shadow_of
from polyfed.studies.compare.compare import holds_run

HALF = (0.5, 0.5, 0.5)
IMAGENET = (0.485, 0.456, 0.406)
NETWORK = "torchvision:squeezenet1_1"
NEW_FACTS = ("input_shape", "mean", "std")


def stopped(run: RunState) -> None:
    if run.round == 1:
        raise KeyboardInterrupt


def photographs(root: Path) -> str:
    for domain in ("a", "b"):
        for shade, label in ((40, "dark"), (200, "light")):
            (root / domain / label).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (40, 40), (shade + number, shade, 255 - shade)).save(root / domain / label / f"{number}.png")
    return str(root)


class Before:
    """Runs of a version that used the image size and normalisation of the data set."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(1)
        save_file(models.build(as_call(NETWORK), classes=5, input_shape=(3, 64, 64)).state_dict(), folder / "w.safetensors")
        self.settings = Settings(
            data=photographs(folder / "images"),
            model=f'{NETWORK}(weights="{folder / "w.safetensors"}")',
            method="fedavg",
            rounds=2,
            local_steps=1,
            batch_size=4,
            lr=0.001,
            checkpoint_every="1",
        )
        self.whole, self.part = folder / "whole", folder / "part"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experiment, "normalised_for", lambda model, federation: federation)
            patch.setattr(assemble, "images_of_weights", lambda text: None)
            identity = FederationSummary.identity
            patch.setattr(
                FederationSummary,
                "identity",
                lambda summary: {key: value for key, value in identity(summary).items() if key not in NEW_FACTS},
            )
            self.result = train_run(Experiment(self.settings), RunFolder(self.whole))
            with pytest.raises(KeyboardInterrupt):
                train_run(Experiment(self.settings), RunFolder(self.part), callbacks=[AfterRound(stopped)])


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Before:
    return Before(tmp_path_factory.mktemp("before"))


def images(side: int = 64) -> torch.Tensor:
    return torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def test_it_predicts_and_is_exported_as_it_was_trained(before: Before) -> None:
    opened = polyfed.open_run(before.whole)
    assert opened.experiment.bench.preparation.mean == HALF
    assert opened.predict(images()) == before.result.predict(images())
    assert '"mean": [0.5, 0.5, 0.5]' in metadata(opened.experiment, "shared", False)["normalised"]


def test_it_is_evaluated_on_its_own_data_as_it_was(before: Before) -> None:
    opened = open_experiment(before.whole, own_data=True)
    assert opened.federation.sample_input().shape[1:] == (3, 64, 64)
    assert opened.evaluate(in_detail=True) == before.result.rows


def test_it_is_resumed_to_the_same_end(before: Before) -> None:
    assert polyfed.resume(before.part).digest == before.result.digest


def test_shadow_runs_of_an_audit_read_images_as_the_run_did(before: Before) -> None:
    opened = open_experiment(before.whole, own_data=True)
    pools = {client.id: pool_of(client, 2, 0) for client in opened.federation.clients}
    members = {name: torch.ones(len(pool.whole), dtype=torch.bool) for name, pool in pools.items()}
    assert shadow_of(opened, pools, members, 0, None).bench.preparation.mean == HALF


def test_a_comparison_of_today_does_not_take_it_for_its_own(before: Before) -> None:
    today = Experiment(before.settings)
    assert today.bench.preparation.mean == IMAGENET and today.federation.sample_input().shape[-1] == 224
    assert not holds_run(RunFolder(before.whole), today)
    assert holds_run(RunFolder(before.whole), Experiment(before.settings, recorded=RunFolder(before.whole).recorded_inputs()))


def two_domains(side: int, mean: tuple[float, ...] = HALF) -> DataSet:
    def examples(count: int) -> ArrayExamples:
        return ArrayExamples(images(side)[:1].repeat(count, 1, 1, 1), torch.arange(count) % 2)

    domains = tuple(Domain(name, examples(4), examples(2)) for name in ("a", "b"))
    return DataSet("two", ("no", "yes"), domains, Preparation(mean=mean), default_model="small_cnn", source="made here")


def test_data_of_another_size_are_refused_and_another_normalisation_is_not_taken(tmp_path: Path) -> None:
    made = polyfed.run(two_domains(16), rounds=1, batch_size=2, out=tmp_path / "r")
    with pytest.raises(DataError, match="trained on inputs of 3x16x16, but two now has inputs of 3x24x24"):
        polyfed.resume(tmp_path / "r", data=two_domains(24))
    again = polyfed.resume(tmp_path / "r", data=two_domains(16, IMAGENET))
    assert again.digest == made.digest and again.experiment.bench.preparation.mean == HALF


def test_inputs_are_part_of_what_data_are_recognised_by() -> None:
    def identity(side: int, mean: tuple[float, ...] = HALF) -> dict[str, Any]:
        return FederationSummary.of(Experiment(Settings(batch_size=2), two_domains(side, mean)).federation).identity()

    then = identity(16)
    assert differences(then, identity(16)) == []
    assert differences(then, identity(24)) == ["inputs are 3x24x24 instead of 3x16x16"]
    assert differences(then, identity(16, IMAGENET)) == [
        f"channels are normalised with the mean {list(IMAGENET)} instead of {list(HALF)}"
    ]
    older = {key: value for key, value in then.items() if key not in NEW_FACTS}
    assert differences(older, identity(24)) == []


def test_a_damaged_record_gets_one_sentence(tmp_path: Path) -> None:
    polyfed.run(two_domains(16), rounds=1, batch_size=2, out=tmp_path / "r")
    folder = RunFolder(tmp_path / "r")
    document = {**folder.document(), "outline": {"input_shape": "wide", "mean": [], "std": []}}
    folder.document = lambda: document  # type: ignore[method-assign]
    with pytest.raises(RunFolderError, match=r"description of the inputs .* is damaged"):
        folder.recorded_inputs()
