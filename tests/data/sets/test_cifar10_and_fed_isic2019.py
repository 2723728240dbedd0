"""CIFAR-10 and Fed-ISIC2019 read from tiny copies of their layouts, and what holds for every data set."""

from __future__ import annotations

import csv
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyfed.data.registry import data_sets
from polyfed.data.sets.office_caltech10 import office_caltech10
from polyfed.errors import DataError, OptionError
from polyfed.models import models


def packed(source: Path, target: Path, mode: str = "w") -> None:
    with tarfile.open(target, mode) as archive:
        archive.add(source, source.name)


def labels_of(examples) -> list[int]:
    return examples.labels.tolist()


def colours(examples) -> list[tuple[int, ...]]:
    return [tuple(pixel) for pixel in examples.batch(slice(None))[0][:, :, 0, 0].tolist()]


# CIFAR-10


def cifar_batches(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).integers(0, 256, (60, 3, 32, 32), np.uint8)
    y = np.arange(60) * 7 % 10
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        rows = slice(10 * number, 10 * number + 10)
        (folder / name).write_bytes(pickle.dumps({"data": x[rows].reshape(10, -1), "labels": y[rows].tolist(), "filenames": []}, 2))
    return x, y


@pytest.mark.parametrize("layout", ["folder", "inside", "archive"])
def test_cifar10_from_the_published_batches(tmp_path, layout):
    folder = tmp_path / "cifar-10-batches-py"
    x, y = cifar_batches(folder)
    root = folder if layout == "inside" else tmp_path
    if layout == "archive":
        root = tmp_path / "downloads"
        root.mkdir()
        packed(folder, root / "cifar-10-python.tar.gz", "w:gz")
    (domain,) = data_sets.build("cifar10(validation=0.2)", root=str(root)).domains
    assert (domain.train.batch(slice(None))[0].numpy() == x[:40]).all()
    assert labels_of(domain.train) == y[:40].tolist()
    assert labels_of(domain.validation) == y[40:50].tolist()
    assert (domain.test.batch(slice(None))[0].numpy() == x[50:]).all()
    five, nine = (data_sets.build(f"cifar10(per_domain={kept})", root=str(root)).domains[0].train for kept in (5, 9))
    assert (len(five), len(nine)) == (5, 9)
    assert {image.tobytes() for image in five.batch(slice(None))[0].numpy()} < {
        image.tobytes() for image in nine.batch(slice(None))[0].numpy()
    }


def test_cifar10_names_a_missing_and_a_hostile_batch(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    cifar_batches(folder)
    (folder / "data_batch_2").write_bytes(b"cposix\nsystem\n(S'touch harmed'\ntR.")
    with pytest.raises(DataError, match=r"data_batch_2 refers to posix\.system"):
        data_sets.build("cifar10", root=str(tmp_path))
    (folder / "data_batch_2").unlink()
    with pytest.raises(DataError, match="does not contain data_batch_2"):
        data_sets.build("cifar10", root=str(tmp_path))


def mosaic(images: np.ndarray, per_row: int) -> bytes:
    count, side = len(images), images.shape[-1]
    rows = -(-count // per_row)
    canvas = np.zeros((rows * side, per_row * side, 3), np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number, per_row)
        canvas[row * side : (row + 1) * side, column * side : (column + 1) * side] = image.transpose(1, 2, 0)
    stream = io.BytesIO()
    Image.fromarray(canvas).save(stream, "JPEG", quality=95, subsampling=0)
    return stream.getvalue()


def test_cifar10_from_mosaics(tmp_path):
    shades = (np.arange(24) * 10)[:, None, None, None] * np.ones((1, 3, 32, 32))
    folder = tmp_path / "made" / "cifar10"
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        (folder / f"{name}.jpg").write_bytes(mosaic(shades[4 * number : 4 * number + 4].astype(np.uint8), 2))
    (folder / "train_labels.txt").write_text("\n".join(str(n % 10) for n in range(20)))
    (folder / "test_labels.txt").write_text("\n".join(str(n % 10) for n in range(20, 24)))
    packed(folder, tmp_path / "cifar10_jpeg90.tar")
    data = data_sets.build("cifar10", root=str(tmp_path))
    (domain,) = data.domains
    assert domain.train.batch(slice(None))[0].float().mean((1, 2, 3)).tolist() == pytest.approx([n * 10 for n in range(20)], abs=2)
    assert labels_of(domain.test) == [0, 1, 2, 3]
    assert "lossy" in data.source


# Fed-ISIC2019


def test_fed_isic_from_flambys_folder_has_six_centres(tmp_path):
    rows = []
    for centre in range(6):
        for number in range(10):
            name = f"ISIC_{centre}{number:03d}"
            folder = tmp_path / "ISIC_2019_Training_Input_preprocessed"
            folder.mkdir(exist_ok=True)
            wide = np.zeros((8, 16, 3), np.uint8)
            wide[:, 4:12] = (centre, number, 0)
            Image.fromarray(wide).save(folder / f"{name}.jpg", "PNG")
            rows.append({"image": name, "target": number % 8, "center": centre, "fold": "test" if number >= 8 else "train"})
    with (tmp_path / "train_test_split").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["image", "target", "center", "fold"])
        writer.writeheader()
        writer.writerows(rows)
    data = data_sets.build("fed_isic2019(size=8, validation=0.25)", root=str(tmp_path))
    assert [domain.name for domain in data.domains] == ["BCN", "Vidir-molemax", "Vidir-modern", "Rosendahl", "MSK", "Vienna-dias"]
    msk = data.domain("MSK")
    assert colours(msk.train) == [(4, number, 0) for number in range(6)]
    assert (msk.train.batch(slice(1, 2))[0][0, 0] == 4).all(), "the middle square"
    assert labels_of(msk.validation) == [6, 7]
    assert labels_of(msk.test) == [0, 1]
    (tmp_path / "ISIC_2019_Training_Input_preprocessed" / "ISIC_4003.jpg").unlink()
    with pytest.raises(DataError, match="ISIC_4003 of MSK"):
        data_sets.build("fed_isic2019", root=str(tmp_path))


def test_fed_isic_from_mosaics_has_four_centres_and_lesions(tmp_path):
    folder = tmp_path / "ham10000"
    folder.mkdir()
    header = "domain,tile,image_id,lesion_id,dx,flamby_target,flamby_center,flamby_fold"
    lines = [header]
    for domain in ("vidir_molemax", "vidir_modern", "rosendahl", "vienna_dias"):
        shades = (np.arange(5) * 40)[:, None, None, None] * np.ones((1, 3, 64, 64))
        (folder / f"{domain}.jpg").write_bytes(mosaic(shades.astype(np.uint8), 3))
        for tile in reversed(range(5)):
            lines.append(f"{domain},{tile},ISIC_{tile},HAM_{tile // 2},nv,{tile},1,{'test' if tile == 1 else 'train'}")
    (folder / "index.csv").write_text("\n".join(lines))
    data = data_sets.build("fed_isic2019(size=32)", root=str(tmp_path))
    assert [domain.name for domain in data.domains] == ["Vidir-molemax", "Vidir-modern", "Rosendahl", "Vienna-dias"]
    for domain in data.domains:
        x, y = domain.train.batch(slice(None))
        assert y.tolist() == [0, 2, 3, 4]
        assert x.float().mean((1, 2, 3)).tolist() == pytest.approx([0, 80, 120, 160], abs=2)
        assert x.shape[2:] == (32, 32)
        assert domain.groups.tolist() == [0, 1, 1, 2]
        assert labels_of(domain.test) == [1]


# Every data set


def test_options_are_checked(tmp_path):
    for text in (
        'pacs(test="x")',
        'pacs(augment="flop")',
        "digits_five(per_domain=-1)",
        "cifar10(validation=1.0)",
        'vlcs(normalise="x")',
    ):
        with pytest.raises(OptionError):
            data_sets.build(text, root=str(tmp_path))
    with pytest.raises(OptionError, match="no effect"):
        office_caltech10(str(tmp_path), protocol="fedbn", validation=0.1)


@pytest.mark.parametrize("name", ["digits_five", "pacs", "office_caltech10", "cifar10", "fed_isic2019"])
def test_every_set_lists_its_layouts_and_what_was_found(name, tmp_path):
    (tmp_path / "holiday.txt").write_text("")
    with pytest.raises(DataError, match=r"holiday\.txt.*read from: \(1\) .*; \(2\) "):
        data_sets.build(name, root=str(tmp_path))
    with pytest.raises(DataError, match="does not exist"):
        data_sets.build(name, root=str(tmp_path / "none"))
    declaration = data_sets.find(name).extra["declaration"]
    assert all((declaration.title, declaration.splits, declaration.terms, declaration.citation, *declaration.layouts))
    assert models.find(declaration.default_model)
    assert all(len(digest) == 64 for digest in declaration.packed_sha256.values())
