"""polyfed data check: a removed file, a truncated image, a swapped folder and a wrong archive are each named."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyfed.data.check import check
from polyfed.data.registry import data_sets
from polyfed.data.sets.pacs import CLASSES, DOMAINS, PACS
from polyfed.errors import DataError, UnknownName

PER_CLASS = (3, 4, 5, 6, 7, 8, 9)


@pytest.fixture(autouse=True)
def small_pacs(monkeypatch):
    """Expect as many images as the copies made here have."""
    expected = {layout: {domain: {"all": PER_CLASS} for domain in DOMAINS} for layout in PACS.expected}
    monkeypatch.setitem(data_sets.find("pacs").extra, "declaration", dataclasses.replace(PACS, expected=expected))


@pytest.fixture
def root(tmp_path) -> Path:
    random = np.random.default_rng(0)
    for domain in DOMAINS:
        for label, count in zip(CLASSES, PER_CLASS, strict=True):
            folder = tmp_path / "PACS" / domain / label
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / f"pic_{number:03d}.jpg")
    return tmp_path


def test_a_sound_copy_passes(root):
    result = check("pacs", str(root))
    assert result.ok, result.problems
    assert list(result.counts) == list(DOMAINS)
    assert result.counts["photo"]["all"] == PER_CLASS
    assert sum(result.counts["photo"]["train"]) + sum(result.counts["photo"]["validation"]) == sum(PER_CLASS)
    assert "all as expected" in result.summary()


def test_a_removed_file_is_found(root):
    (root / "PACS" / "cartoon" / "horse" / "pic_002.jpg").unlink()
    result = check("pacs", str(root))
    assert result.problems == ("cartoon: 6 images of the class horse, expected 7.",)
    assert "1 problem" in result.summary()


def write_lists(root: Path) -> None:
    for domain in DOMAINS:
        files = sorted((root / "PACS" / domain).rglob("*.jpg"))
        for kind, chosen in (("train", files[1:]), ("crossval", files[:1])):
            lines = [f"{domain}/{path.parent.name}/{path.name} 1" for path in chosen]
            (root / f"{domain}_{kind}_kfold.txt").write_text("\n".join(lines))


def test_a_removed_file_is_named_when_there_are_lists(root):
    write_lists(root)
    assert check("pacs", str(root)).ok
    (root / "PACS" / "art_painting" / "horse" / "pic_002.jpg").unlink()
    first, second = check("pacs", str(root)).problems
    assert "artpainting/horse/pic_002.jpg, which is missing" in first
    assert "6 images of the class horse, expected 7" in second


def test_a_truncated_image_is_named(root):
    path = root / "PACS" / "photo" / "dog" / "pic_001.jpg"
    os.truncate(path, path.stat().st_size // 2)
    first, second = check("pacs", str(root)).problems
    assert "photo/dog/pic_001.jpg cannot be read" in first
    assert "2 images of the class dog, expected 3" in second


def test_swapped_folders_are_named(root):
    sketch = root / "PACS" / "sketch"
    (sketch / "dog").rename(sketch / "x")
    (sketch / "person").rename(sketch / "dog")
    (sketch / "x").rename(sketch / "person")
    problems = check("pacs", str(root)).problems
    assert "sketch: the numbers of images of the classes dog and person are exchanged. Their folders may be swapped." in problems
    assert len(problems) == 3


def test_a_renamed_class_folder_and_a_missing_domain_are_named(root):
    (root / "PACS" / "photo" / "dog").rename(root / "PACS" / "photo" / "dogs")
    shutil.rmtree(root / "PACS" / "sketch")
    problems = " ".join(check("pacs", str(root)).problems)
    assert "the domain photo has no images of the class dog" in problems
    assert "a folder dogs" in problems
    assert "no images of the domain sketch" in problems


def test_a_wrong_and_a_truncated_archive_are_named(root, tmp_path):
    packed = tmp_path / "packed" / "pacs96.tar"
    packed.parent.mkdir()
    with tarfile.open(packed, "w") as archive:
        archive.add(root / "PACS", "PACS")
    (problem,) = check("pacs", str(packed.parent)).problems
    assert "pacs96.tar has the wrong checksum" in problem and PACS.packed_sha256["pacs96.tar"] in problem
    os.truncate(packed, packed.stat().st_size // 2 + 100)
    first, second = check("pacs", str(packed.parent)).problems
    assert "pacs96.tar has the wrong checksum" in first and "pacs96.tar is a damaged tar archive" in second
    shutil.rmtree(root / "PACS" / "sketch" / "person")
    with tarfile.open(packed, "w") as archive:
        archive.add(root / "PACS", "PACS")
    assert "the domain sketch has no images of the class person" in " ".join(check("pacs", str(packed.parent)).problems)


def test_missing_parts_of_other_sets_are_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"")
    problems = " ".join(check("cifar10", str(tmp_path)).problems)
    assert "does not contain data_batch_3" in problems
    assert "data_batch_1 is not a readable pickle" in problems
    (tmp_path / "ham10000").mkdir()
    (tmp_path / "ham10000" / "index.csv").write_text("domain,tile,lesion_id,flamby_target,flamby_fold\nrosendahl,0,a,1,train\n")
    problems = " ".join(check("fed_isic2019", str(tmp_path)).problems)
    assert "does not contain vidir_modern.jpg" in problems
    assert "rosendahl.jpg" in problems


def test_a_leaked_duplicate_is_found(root):
    write_lists(root)
    assert not check("pacs", str(root)).notes
    dogs = root / "PACS" / "photo" / "dog"
    shutil.copy(dogs / "pic_000.jpg", dogs / "pic_001.jpg")
    shutil.copy(root / "PACS" / "photo" / "person" / "pic_000.jpg", root / "PACS" / "sketch" / "person" / "pic_001.jpg")
    leak, across = check("pacs", str(root)).notes
    assert "1 image is in more than one of train, validation and test" in leak and "photo/dog/pic_000.jpg" in leak
    assert "1 image is in more than one domain" in across and "photo/person/pic_000.jpg" in across


def test_nothing_there_and_unknown_names(tmp_path):
    with pytest.raises(DataError, match="PACS was not found"):
        check("pacs", str(tmp_path))
    with pytest.raises(UnknownName, match="pacs"):
        check("pasc", str(tmp_path))
    with pytest.raises(DataError, match="no files to check"):
        check("digits_mini", str(tmp_path))
