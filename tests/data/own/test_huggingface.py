"""Copies that Hugging Face's ``datasets`` wrote: save_to_disk with and without splits, and Parquet files as the hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import polyfed
from helpers.command_line import Command, says
from polyfed.data.registry import data_sets
from polyfed.errors import DataError, MissingExtra

datasets = pytest.importorskip("datasets", reason="needs the extra polyfed[huggingface]")
datasets.disable_progress_bars()


def rows(count: int = 40, seed: int = 0, patients: bool = False, **changes: Any) -> Any:
    """Two domains, two named classes, four images of each patient."""
    random = np.random.default_rng(seed)
    values = {
        "image": [Image.fromarray(random.integers(0, 256, (20, 20, 3), np.uint8)) for _ in range(count)],
        "domain": ["north" if row < count // 2 else "south" for row in range(count)],
        "label": [row % 2 for row in range(count)],
        "patient": [f"p{row // 4}" for row in range(count)],
        **changes,
    }
    text = datasets.Value("string")
    features = {"image": datasets.Image(), "domain": text, "label": datasets.ClassLabel(names=["no", "yes"]), "patient": text}
    made = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    return made if patients else made.remove_columns("patient")


def sizes(data: Any) -> dict[str, tuple[int, int, int]]:
    return {d.name: (len(d.train), 0 if d.validation is None else len(d.validation), len(d.test)) for d in data.domains}


def test_a_folder_without_splits_is_split_by_class(tmp_path: Path) -> None:
    rows().save_to_disk(tmp_path / "copy")
    data = data_sets.build(f'huggingface(root="{tmp_path / "copy"}", size=20)')
    assert data.classes == ("no", "yes") and sizes(data) == {"north": (14, 2, 4), "south": (14, 2, 4)}
    x, y = data.domain("north").train.batch(slice(0, 1))
    originals = [np.asarray(image).transpose(2, 0, 1) for image in rows()["image"]]
    place = next(number for number, pixels in enumerate(originals) if np.array_equal(pixels, x[0].numpy()))
    assert place % 2 == int(y[0]) and place < 20, "the picture, its class and its domain belong together"


def test_groups_stay_together(tmp_path: Path) -> None:
    rows(patients=True).save_to_disk(tmp_path / "copy")
    data = data_sets.build(f'huggingface(root="{tmp_path / "copy"}", group="patient", size=16)')
    pixels = {image.tobytes(): row // 4 for row, image in enumerate(i.resize((16, 16), 2) for i in rows()["image"])}
    for domain in data.domains:
        parts = [part for part in (domain.train, domain.validation, domain.test) if part is not None]
        patients = [{pixels[x.permute(1, 2, 0).numpy().tobytes()] for x in part.batch(slice(None))[0]} for part in parts]
        assert all(not one & other for one in patients for other in patients if one is not other)


@pytest.mark.parametrize("form", ["folder", "parquet", "parquet in data"])
def test_splits_of_the_copy_are_the_parts(tmp_path: Path, form: str) -> None:
    parts = {"train": rows(24), "validation": rows(8, 1), "test": rows(12, 2)}
    if form == "folder":
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "copy")
    else:
        folder = tmp_path / "copy" / ("data" if form == "parquet in data" else "")
        folder.mkdir(parents=True)
        for name, part in parts.items():
            part.to_parquet(folder / f"{name}-00000-of-00001.parquet")
    data = polyfed.run(str(tmp_path / "copy"), "fedavg", rounds=1, local_steps=1, batch_size=4).experiment.federation
    assert {client.id: len(client.train) for client in data.clients} == {"north": 12, "south": 12}
    assert all(len(client.validation or ()) == 4 and len(client.tests[client.id]) == 6 for client in data.clients)


def test_a_copy_as_the_hub_has_imagenet(tmp_path: Path) -> None:
    """Its test split has no labels (-1), so the validation split is the test part, as in the folders of ImageNet."""
    parts = {"train": rows(24), "validation": rows(8, 1), "test": rows(12, 2, label=[-1] * 12)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "copy")
    data = data_sets.build(f'huggingface(root="{tmp_path / "copy"}", size=20, validation_share=0.25)')
    assert sizes(data) == {"north": (9, 3, 4), "south": (9, 3, 4)}
    assert data.notes == (f"{tmp_path / 'copy'}: skipping 12 of 44 images, which have no label.",)
    tested = {image.tobytes() for image in rows(8, 1)["image"]}
    assert {x.permute(1, 2, 0).numpy().tobytes() for d in data.domains for x in d.test.batch(slice(None))[0]} == tested


def test_labels_that_are_words_and_no_domains(tmp_path: Path) -> None:
    rows().cast_column("label", datasets.Value("string")).remove_columns("domain").save_to_disk(tmp_path / "copy")
    data = data_sets.build(f'huggingface(root="{tmp_path / "copy"}")')
    assert data.classes == ("0", "1") and [domain.name for domain in data.domains] == ["copy"]


def test_the_commands(polyfed: Command, tmp_path: Path) -> None:
    rows().save_to_disk(tmp_path / "copy")
    assert polyfed("data", "check", "copy").code == 0
    says(polyfed("run", 'huggingface(root="copy", label="labels")'), "no column 'labels'", "label")
    says(polyfed("run", 'huggingface(root="copy", domain="hospital")'), "no column 'hospital'")
    (tmp_path / "nothing").mkdir()
    says(polyfed("run", 'huggingface(root="nothing")'), "is not a copy by Hugging Face datasets")


def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train-0.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"Cannot read .* as a copy"):
        data_sets.build(f'huggingface(root="{tmp_path / "broken"}")')
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"polyfed\[huggingface\]"):
        data_sets.build(f'huggingface(root="{tmp_path / "broken"}")')
