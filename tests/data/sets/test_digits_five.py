"""Digits-Five from a tiny copy of every supported layout."""

from __future__ import annotations

import bz2
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polyfed.data.formats.digit_files import DIGIT_FILES
from polyfed.data.sets.digits_five import digits_five
from polyfed.errors import DataError

FOLDERS = {"MNIST": "MNIST", "SVHN": "SVHN", "USPS": "USPS", "SynthDigits": "SynthDigits", "MNIST-M": "MNIST_M"}


def digits(count, side, colours, seed):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, side, side, *([3] if colours else [])), np.uint8), np.arange(count) % 10


def write_pickle(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, 4))


def fedbn_folders(root: Path) -> dict[str, np.ndarray]:
    """Ten parts of two images, a whole training file of 30, and 10 test images a domain."""
    wholes = {}
    for seed, (domain, folder) in enumerate(FOLDERS.items()):
        side, colours = {"MNIST": (28, False), "USPS": (16, False), "MNIST-M": (28, True)}.get(domain, (32, True))
        x, y = digits(30, side, colours, seed)
        for part in range(10):
            rows = slice(2 * part, 2 * part + 2)
            write_pickle(root / folder / "partitions" / f"train_part{part}.pkl", (x[rows], y[rows]))
        write_pickle(root / folder / "train.pkl", (x, y))
        write_pickle(root / folder / "test.pkl", digits(10, side, colours, 100 + seed))
        wholes[domain] = x
    return wholes


def test_digits_from_fedbns_folders(tmp_path):
    wholes = fedbn_folders(tmp_path)
    data = digits_five(str(tmp_path), per_domain=3)
    assert [domain.name for domain in data.domains] == list(FOLDERS)
    assert [len(domain.train) for domain in data.domains] == [3] * 5
    assert [len(domain.test) for domain in data.domains] == [10] * 5
    x, y = data.domain("MNIST").train.batch(slice(None))
    assert x.shape == (3, 3, 28, 28)
    assert x.dtype == torch.uint8
    assert (x.numpy() == wholes["MNIST"][:3, None]).all(), "grey is repeated, across the border of two parts"
    assert y.tolist() == [0, 1, 2]
    shrunk = np.asarray(Image.fromarray(wholes["SVHN"][2]).resize((28, 28), Image.Resampling.BILINEAR))
    assert (data.domain("SVHN").train.batch(slice(2, 3))[0][0].permute(1, 2, 0).numpy() == shrunk).all()
    enlarged = np.asarray(Image.fromarray(wholes["USPS"][0]).resize((28, 28), Image.Resampling.BILINEAR))
    assert (data.domain("USPS").train.batch(slice(0, 1))[0][0, 1].numpy() == enlarged).all()
    assert "partitions/train_part" in data.source
    assert "MNIST 3/0/10" in data.source


def test_digits_take_the_whole_file_when_all_are_wanted(tmp_path):
    fedbn_folders(tmp_path)
    data = digits_five(str(tmp_path), per_domain=0, validation=0.1)
    assert [len(domain.train) for domain in data.domains] == [27] * 5
    assert data.domain("MNIST").validation.labels.tolist() == [7, 8, 9], "validation is the end of the training order"
    assert "train.pkl and test.pkl" in data.source


def test_parts_in_the_domain_folder_itself_and_a_gap(tmp_path):
    fedbn_folders(tmp_path)
    for folder in FOLDERS.values():
        (tmp_path / folder / "train.pkl").unlink()
        for part in sorted((tmp_path / folder / "partitions").iterdir()):
            part.rename(tmp_path / folder / part.name)
    assert [len(domain.train) for domain in digits_five(str(tmp_path), per_domain=0).domains] == [20] * 5
    (tmp_path / "SVHN" / "train_part4.pkl").unlink()
    with pytest.raises(DataError, match=r"lacks train_part4\.pkl"):
        digits_five(str(tmp_path))


def test_a_hostile_part_is_refused(tmp_path):
    fedbn_folders(tmp_path)
    (tmp_path / "USPS" / "partitions" / "train_part0.pkl").write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR.")
    with pytest.raises(DataError, match=r"train_part0\.pkl refers to os\.system"):
        digits_five(str(tmp_path))


def idx(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim)) + b"".join(side.to_bytes(4, "big") for side in array.shape) + array.astype(np.uint8).tobytes()
    )


def original_files(root: Path) -> None:
    """MNIST as torchvision keeps it, SVHN and USPS next to it, SynthDigits and MNIST-M in FedBN's folders: 60 + 40 images."""
    from scipy.io import savemat

    (root / "MNIST" / "raw").mkdir(parents=True)
    for split, seed, count in (("train", 0, 60), ("t10k", 1, 40)):
        x, y = digits(count, 28, False, seed)
        (root / "MNIST" / "raw" / f"{split}-images-idx3-ubyte").write_bytes(idx(x))
        (root / "MNIST" / "raw" / f"{split}-labels-idx1-ubyte").write_bytes(idx(y))
    for split, count in (("train", 60), ("test", 40)):
        x, y = digits(count, 32, True, count)
        savemat(root / f"{split}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[:, None]})
        (root / "SynthDigits").mkdir(exist_ok=True)
        savemat(root / "SynthDigits" / f"synth_{split}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": y[:, None]})
    for name, count in (("usps.bz2", 60), ("usps.t.bz2", 40)):
        lines = [f"{label % 10 + 1} " + " ".join(f"{place}:{label / 100}" for place in range(1, 257)) for label in range(count)]
        (root / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    arrays = {}
    for split, count in (("train", 50), ("valid", 10), ("test", 40)):
        arrays[split], arrays[f"{split}_label"] = digits(count, 28, True, count)
    write_pickle(root / "MNIST_M" / "mnistm_data.pkl", arrays)


def test_digits_from_the_original_files_are_split_as_by_fedbn(tmp_path):
    original_files(tmp_path)
    data = digits_five(str(tmp_path), per_domain=0)
    assert [domain.name for domain in data.domains] == list(FOLDERS)
    for domain in data.domains:
        assert (len(domain.train), len(domain.test)) == (80, 20)
        assert Counter(domain.test.labels.tolist()) == dict.fromkeys(range(10), 2), domain.name
    whole = np.concatenate([digits(60, 28, False, 0)[0], digits(40, 28, False, 1)[0]])
    parts = [part.batch(slice(None))[0][:, 0].numpy() for part in (data.domain("MNIST").train, data.domain("MNIST").test)]
    assert sorted(image.tobytes() for part in parts for image in part) == sorted(image.tobytes() for image in whole)
    assert "split 80/20 as by FedBN" in data.source
    assert (
        digits_five(str(tmp_path), per_domain=7).domain("USPS").train.labels.tolist()
        == data.domain("USPS").train.labels.tolist()[:7]
    )


def packed_digits(root: Path) -> None:
    (root / "digits5").mkdir(parents=True)
    for seed, name in enumerate(("mnist", "svhn", "usps", "synth_digits_made", "mnist_m")):
        x, y = digits(60, 28, name not in ("mnist", "usps"), seed)
        np.savez(root / "digits5" / f"{name}.npz", train_x=x[:40], train_y=y[:40], test_x=x[40:], test_y=y[40:])


def test_packed_subsets_keep_their_parts_and_the_made_domain_is_called_so(tmp_path):
    packed_digits(tmp_path)
    for root in (tmp_path, tmp_path / "digits5"):
        data = digits_five(str(root), per_domain=5)
        assert [domain.name for domain in data.domains] == ["MNIST", "SVHN", "USPS", "SynthDigits (made)", "MNIST-M"]
        assert len(data.domains[1].test) == 20
        assert "SynthDigits (made) 5/0/20" in data.source
    whole = digits_five(str(tmp_path)).domain("SVHN")
    assert len(whole.train) == 40, "as many as there are"
    x, _ = digits(60, 28, True, 1)
    order = np.random.default_rng(0).permutation(40)
    assert (whole.train.batch(slice(None))[0].permute(0, 2, 3, 1).numpy() == x[:40][order]).all(), "shuffled with seed 0"
    assert (whole.test.batch(slice(None))[0].permute(0, 2, 3, 1).numpy() == x[40:]).all()
    assert data.domain("SVHN").train.labels.tolist() == whole.train.labels.tolist()[:5], "the first of the shuffled order"


@pytest.mark.parametrize("domain", ["MNIST", "USPS"])
def test_packed_whole_sets_are_split_as_the_original_files_are(tmp_path, domain):
    packed_digits(tmp_path)
    data = digits_five(str(tmp_path), per_domain=0).domain(domain)
    paths = []
    with np.load(tmp_path / "digits5" / f"{domain.lower()}.npz") as arrays:
        for name in ("train_x", "train_y", "test_x", "test_y"):
            (tmp_path / name).write_bytes(idx(arrays[name]))
            paths.append(tmp_path / name)
    expected = DIGIT_FILES[0].read_original(paths)
    assert (data.train.batch(slice(None))[0][:, 0].numpy() == expected.train_x).all()
    assert (data.test.batch(slice(None))[0][:, 0].numpy() == expected.test_x).all()
    assert (len(data.train), len(data.test)) == (48, 12)
    assert data.test.labels.tolist() == expected.test_y.tolist()


def test_domains_may_have_different_layouts(tmp_path):
    packed_digits(tmp_path)
    fedbn_folders(tmp_path / "other")
    (tmp_path / "other" / "SynthDigits").rename(tmp_path / "SynthDigits")
    for split, count in (("train", 12), ("test", 4)):
        folder = tmp_path / "mnist_m" / f"mnist_m_{split}"
        folder.mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (32, 32), (number % 10, 0, 0)).save(folder / f"{number:08d}.png")
        lines = [f"{number:08d}.png {number % 10}" for number in range(count)]
        folder.with_name(f"{folder.name}_labels.txt").write_text("\n".join(lines))
    data = digits_five(str(tmp_path), per_domain=11)
    assert [domain.name for domain in data.domains] == list(FOLDERS)
    assert data.domain("MNIST-M").train.labels.tolist() == [*range(10), 0]
    assert data.domain("MNIST-M").train.batch(slice(3, 4))[0][0, :, 0, 0].tolist() == [3, 0, 0]
    assert "Ganin" in data.source
    assert "packed" in data.source


def test_a_domain_that_is_missing_is_named_with_what_would_work(tmp_path):
    packed_digits(tmp_path)
    (tmp_path / "digits5" / "usps.npz").unlink()
    with pytest.raises(DataError, match="USPS of Digits-Five was not found") as caught:
        digits_five(str(tmp_path))
    assert "digits5/" in str(caught.value)
    assert "FedBN's prepared folders" in str(caught.value)


def test_labels_outside_the_digits_are_refused(tmp_path):
    packed_digits(tmp_path)
    x, y = digits(30, 28, True, 0)
    np.savez(tmp_path / "digits5" / "svhn.npz", train_x=x, train_y=y + 1, test_x=x, test_y=y)
    with pytest.raises(DataError, match="labels from 0 to 10"):
        digits_five(str(tmp_path))
