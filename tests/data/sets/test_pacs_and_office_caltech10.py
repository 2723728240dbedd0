"""PACS and Office-Caltech-10 read from tiny copies of their folders, lists and archives."""

from __future__ import annotations

import pickle
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from polyfed.data.partitions.federate import federate
from polyfed.data.registry import data_sets
from polyfed.data.sets.office_caltech10 import CLASSES as OFFICE_CLASSES
from polyfed.data.sets.office_caltech10 import office_caltech10
from polyfed.data.sets.pacs import CLASSES as PACS_CLASSES
from polyfed.data.sets.pacs import DOMAINS as PACS_DOMAINS
from polyfed.data.sets.pacs import pacs
from polyfed.errors import DataError, OptionError


def write_pickle(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, 4))


def write_image(path: Path, colour: tuple[int, int, int], side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (side, side), colour).save(path, "PNG")


def packed(source: Path, target: Path, mode: str = "w") -> None:
    with tarfile.open(target, mode) as archive:
        archive.add(source, source.name)


def labels_of(examples) -> list[int]:
    return examples.labels.tolist()


# PACS


def pacs_folder(root: Path, per_class: int = 20) -> None:
    for shade, domain in enumerate(PACS_DOMAINS):
        for label, name in enumerate(PACS_CLASSES):
            for number in range(per_class):
                write_image(root / domain / name / f"pic_{number:03d}.png", (shade, label, number))


def pacs_lists(folder: Path, per_class: int = 20) -> None:
    """The last two of a class are crossval; as in the real lists one file is named twice, one not at all, one label is wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain in PACS_DOMAINS:
        lines = {"train": [], "crossval": []}
        for label, name in enumerate(PACS_CLASSES, 1):
            for number in reversed(range(per_class)):
                lines["crossval" if number >= per_class - 2 else "train"].append(f"{domain}/{name}/pic_{number:03d}.png {label}")
        if domain == "art_painting":
            lines["crossval"][0] = lines["crossval"][1][:-1] + "0"
        for kind, listed in lines.items():
            (folder / f"{domain}_{kind}_kfold.txt").write_text("\n".join(listed) + "\n")


def colours(examples) -> list[tuple[int, ...]]:
    return [tuple(pixel) for pixel in examples.batch(slice(None))[0][:, :, 0, 0].tolist()]


def test_pacs_by_the_official_lists(tmp_path):
    pacs_folder(tmp_path / "PACS")
    pacs_lists(tmp_path / "pacs_splits")
    data = pacs(str(tmp_path), size=8)
    assert [domain.name for domain in data.domains] == list(PACS_DOMAINS)
    photo = data.domain("photo")
    assert colours(photo.train) == [(2, label, number) for label in range(7) for number in reversed(range(18))], (
        "in the order of the list"
    )
    assert labels_of(photo.train) == [label for label in range(7) for _ in range(18)]
    crossval = {*colours(photo.validation), *colours(photo.test)}
    assert crossval == {(2, label, number) for label in range(7) for number in (19, 18)}
    assert labels_of(data.domain("art_painting").validation)[0] == 0, "the class is the folder's, not the list's"
    assert "official lists" in data.source


def test_pacs_tests_every_image_of_an_unseen_domain_once_and_no_training_image_of_a_seen_one(tmp_path):
    pacs_folder(tmp_path / "PACS")
    pacs_lists(tmp_path / "PACS")
    federation = federate(pacs(str(tmp_path), size=8), unseen=["photo"], unseen_part="all")
    assert sorted(colours(federation.unseen["photo"])) == [(2, label, number) for label in range(7) for number in range(20)]
    for client in federation.clients:
        assert not set(colours(client.tests[client.id])) & set(colours(client.train))
    with pytest.raises(OptionError, match="no option 'test'"):
        data_sets.build('pacs(test="whole")', root=str(tmp_path))


def test_pacs_held_out_puts_every_image_into_one_part(tmp_path):
    pacs_folder(tmp_path / "PACS")
    pacs_lists(tmp_path / "PACS")
    data = pacs(str(tmp_path), size=8)
    for shade, domain in enumerate(data.domains):
        found = [*colours(domain.train), *colours(domain.validation), *colours(domain.test)]
        assert sorted(found) == [(shade, label, number) for label in range(7) for number in range(20)]
        assert Counter(labels_of(domain.validation)) == dict.fromkeys(range(7), 1)
        assert Counter(labels_of(domain.test)) == dict.fromkeys(range(7), 1)


@pytest.mark.parametrize("place", ["", "PACS", "kfold", "PACS/kfold"])
def test_pacs_in_the_places_people_keep_it_split_by_class(tmp_path, place):
    pacs_folder(tmp_path / place)
    data = pacs(str(tmp_path), size=8)
    for domain in data.domains:
        assert (len(domain.train), len(domain.validation), len(domain.test)) == (126, 7, 7)
        assert Counter([*labels_of(domain.validation), *labels_of(domain.test)]) == dict.fromkeys(range(7), 2)
    assert "stratified 90/10" in data.source


def test_pacs_from_archives(tmp_path):
    pacs_folder(tmp_path / "made" / "PACS", per_class=10)
    pacs_lists(tmp_path / "made" / "pacs_splits", per_class=10)
    packed(tmp_path / "made" / "PACS", tmp_path / "pacs96.tar")
    packed(tmp_path / "made" / "pacs_splits", tmp_path / "pacs_splits.tar.gz", "w:gz")
    data = pacs(str(tmp_path), size=4)
    assert "packed pacs96.tar" in data.source
    assert "official lists" in data.source
    assert data.domains[0].train.batch(slice(0, 1))[0].shape == (1, 3, 4, 4)
    assert len(data.domain("sketch").train) == 56


def test_pacs_names_what_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"PACS was not found in .*the folder is empty.*PACS/<domain>/<class>"):
        pacs(str(tmp_path))
    pacs_folder(tmp_path / "PACS", per_class=4)
    pacs_lists(tmp_path / "pacs_splits", per_class=4)
    (tmp_path / "PACS" / "photo" / "dog" / "pic_001.png").unlink()
    with pytest.raises(DataError, match=r"photo/dog/pic_001\.png, which is missing"):
        pacs(str(tmp_path))
    for path in (tmp_path / "PACS" / "photo" / "dog").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="the domain photo has no images of the class dog"):
        pacs(str(tmp_path))


# Office-Caltech-10

OFFICE_FOLDERS = ("back_pack", *OFFICE_CLASSES[1:])


def office_folder(root: Path, domains: tuple[str, ...] = ("amazon", "caltech", "dslr", "webcam")) -> None:
    for shade, domain in enumerate(domains):
        for label, name in enumerate(OFFICE_FOLDERS):
            for number in range(5 if domain == "dslr" else 10):
                write_image(root / domain / name / f"frame_{number:04d}.jpg", (shade, label, number))


def test_office_split_80_20_with_a_shuffled_training_order(tmp_path):
    office_folder(tmp_path / "office_caltech_10", ("amazon", "Caltech", "dslr", "webcam"))
    data = office_caltech10(str(tmp_path), size=8, validation=0.25)
    assert [domain.name for domain in data.domains] == ["Amazon", "Caltech", "DSLR", "Webcam"]
    assert data.classes[0] == "backpack"
    amazon = data.domain("Amazon")
    assert (len(amazon.train), len(amazon.validation), len(amazon.test)) == (60, 20, 20)
    assert Counter(labels_of(amazon.test)) == dict.fromkeys(range(10), 2)
    assert len(set(labels_of(amazon.train)[:20])) > 5, "the first of the training order are not all of one class"
    found = sorted([*colours(amazon.train), *colours(amazon.validation), *colours(amazon.test)])
    assert found == [(0, label, number) for label in range(10) for number in range(10)]


def test_office_by_fedbns_lists_and_protocol(tmp_path):
    root = tmp_path / "office_caltech_10"
    office_folder(root)
    expected = {}
    for shade, domain in enumerate(("amazon", "caltech", "dslr", "webcam")):
        count = 5 if domain == "dslr" else 10
        files = [(label, number) for number in range(count) for label in range(10)]
        cut = 40 if domain == "dslr" else 80
        for kind, chosen in (("train", files[:cut]), ("test", files[cut:])):
            paths = [f"office_caltech_10/{domain}/{OFFICE_FOLDERS[label]}/frame_{number:04d}.jpg" for label, number in chosen]
            write_pickle(root / f"{domain}_{kind}.pkl", (paths, [OFFICE_FOLDERS[label] for label, _ in chosen]))
        expected[domain] = [(shade, label, number) for label, number in files[:cut]]
    data = office_caltech10(str(tmp_path), size=8, protocol="fedbn")
    webcam = data.domain("Webcam")
    assert colours(webcam.train) == expected["webcam"][:20], "half of the smallest training list, which has 40"
    assert colours(webcam.validation) == expected["webcam"][-16:], "two fifths of it, from the end"
    assert len(webcam.test) == 20
    assert len(data.domain("DSLR").test) == 10
    assert "FedBN's lists" in data.source
    assert "FedBN's protocol" in data.source
    (root / "webcam" / "mug" / "frame_0003.jpg").unlink()
    with pytest.raises(DataError, match=r"webcam/mug/frame_0003\.jpg, which is missing"):
        office_caltech10(str(tmp_path))


def test_office_from_the_packed_tar(tmp_path):
    office_folder(tmp_path / "made" / "office_caltech_10")
    packed(tmp_path / "made" / "office_caltech_10", tmp_path / "office_caltech10_128.tar")
    data = office_caltech10(str(tmp_path), size=8)
    assert "packed office_caltech10_128.tar" in data.source
    assert len(data.domain("DSLR").train) == 40
