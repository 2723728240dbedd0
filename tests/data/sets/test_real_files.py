"""The real files: counts of their README, checks that find damage, and the second start, which decodes nothing."""

from __future__ import annotations

import os
import tarfile

import pytest

from polyfed.core.data_types import DataSet
from polyfed.data.check import check
from polyfed.data.partitions.federate import federate
from polyfed.data.registry import data_sets
from polyfed.data.store import images


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def sizes(data: DataSet) -> dict[str, tuple[int, int, int]]:
    return {
        domain.name: (len(domain.train), 0 if domain.validation is None else len(domain.validation), len(domain.test))
        for domain in data.domains
    }


@pytest.mark.parametrize("name", ["digits_five", "office_caltech10", "cifar10", "fed_isic2019", "vlcs", "camvid"])
def test_the_packed_files_pass_their_check(shared_data, own_cache, name):
    result = check(name, str(shared_data))
    assert result.ok, result.problems


def test_digits_five(shared_data, own_cache):
    data = data_sets.build("digits_five", root=str(shared_data))
    expected = {"MNIST": 14_000, "SVHN": 4_000, "USPS": 1_860, "SynthDigits (made)": 4_000, "MNIST-M": 4_000}
    assert sizes(data) == {name: (743, 0, test) for name, test in expected.items()}
    fives = {domain.name: int((domain.train.labels == 5).sum()) for domain in data.domains}
    assert fives == {"MNIST": 62, "SVHN": 76, "USPS": 45, "SynthDigits (made)": 82, "MNIST-M": 87}, (
        "the order is the same everywhere"
    )
    all_parts = data_sets.build("digits_five(per_domain=7438)", root=str(shared_data / "digits5"))
    assert sizes(all_parts)["USPS"] == (7_438, 0, 1_860)


def test_pacs_and_its_second_start(shared_data, own_cache, monkeypatch):
    data = data_sets.build("pacs", root=str(shared_data))
    monkeypatch.setattr(images, "decoded", lambda content, name: pytest.fail(f"{name} is decoded a second time"))
    again = data_sets.build("pacs", root=str(shared_data))
    again.preparation.for_training(again.domains[0].train.batch(slice(0, 32))[0])
    expected = {
        "art_painting": (1840, 208, 2048),
        "cartoon": (2107, 237, 2344),
        "photo": (1499, 171, 1670),
        "sketch": (3531, 398, 3929),
    }
    assert sizes(again) == sizes(data)
    for name, (train, validation, test) in sizes(data).items():
        assert (train, validation + test) == expected[name][:2]
        parts = [data.domain(name).train.rows, data.domain(name).validation.rows, data.domain(name).test.rows]
        assert sorted(row for rows in parts for row in rows.tolist()) == list(range(expected[name][2]))
    readme = (379, 255, 285, 184, 201, 295, 449)
    whole = federate(again, unseen=["art_painting"], unseen_part="all").unseen["art_painting"]
    assert tuple(whole.labels.bincount().tolist()) == readme


def test_office_caltech10_has_the_published_test_sizes(shared_data, own_cache):
    data = data_sets.build('office_caltech10(protocol="fedbn")', root=str(shared_data))
    assert sizes(data) == {"Amazon": (62, 50, 192), "Caltech": (62, 50, 225), "DSLR": (62, 50, 32), "Webcam": (62, 50, 59)}
    whole = sizes(data_sets.build("office_caltech10", root=str(shared_data)))
    assert {name: train + test for name, (train, _, test) in whole.items()} == {
        "Amazon": 958,
        "Caltech": 1123,
        "DSLR": 157,
        "Webcam": 295,
    }


def test_ham10000_agrees_with_the_diagnoses_of_the_readme(shared_data, own_cache):
    data = data_sets.build("fed_isic2019", root=str(shared_data))
    assert sizes(data) == {
        "Vidir-molemax": (3163, 0, 791),
        "Vidir-modern": (2691, 0, 672),
        "Rosendahl": (1807, 0, 452),
        "Vienna-dias": (351, 0, 88),
    }
    readme = {  # akiec, bcc, bkl, df, mel, nv, vasc
        "Vidir-molemax": (0, 2, 124, 30, 24, 3720, 54),
        "Vidir-modern": (32, 211, 475, 51, 680, 1832, 82),
        "Rosendahl": (295, 296, 490, 30, 342, 803, 3),
        "Vienna-dias": (0, 5, 10, 4, 67, 350, 3),
    }
    for name, expected in readme.items():
        domain = data.domain(name)
        mel, nv, bcc, ak, bkl, df, vasc, scc = (
            domain.train.labels.bincount(minlength=8) + domain.test.labels.bincount(minlength=8)
        ).tolist()
        assert (ak + scc, bcc, bkl, df, mel, nv, vasc) == expected
        assert domain.groups is not None
        assert len(domain.groups) == len(domain.train)


def test_cifar10_in_its_original_order(shared_data, own_cache):
    data = data_sets.build("cifar10(validation=0.1)", root=str(shared_data))
    assert sizes(data) == {"CIFAR-10": (45_000, 5_000, 10_000)}
    assert data.domains[0].train.labels[:5].tolist() == [6, 9, 9, 4, 1], "frog, truck, truck, deer, automobile"
    assert data.domains[0].test.labels[:5].tolist() == [3, 8, 8, 0, 6], "cat, ship, ship, airplane, frog"


@pytest.mark.slow
def test_damage_in_an_unpacked_copy_of_pacs_is_named(shared_data, tmp_path):
    assert check("pacs", str(shared_data)).ok
    for name in ("pacs96.tar", "pacs_splits.tar.gz"):
        with tarfile.open(shared_data / name) as archive:
            archive.extractall(tmp_path, filter="data")
    pacs = tmp_path / "PACS"
    (pacs / "art_painting" / "dog" / "pic_100.jpg").unlink()
    cut = sorted((pacs / "photo" / "house").iterdir())[7]
    os.truncate(cut, cut.stat().st_size * 2 // 3)
    (pacs / "cartoon" / "guitar").rename(pacs / "cartoon" / "x")
    (pacs / "cartoon" / "horse").rename(pacs / "cartoon" / "guitar")
    (pacs / "cartoon" / "x").rename(pacs / "cartoon" / "horse")
    problems = " ".join(check("pacs", str(tmp_path)).problems)
    assert "artpainting/dog/pic_100.jpg, which is missing" in problems
    assert "art_painting: 378 images of the class dog, expected 379" in problems
    assert f"photo/house/{cut.name} cannot be read" in problems
    assert "the numbers of images of the classes guitar and horse are exchanged" in problems


def test_a_changed_byte_in_an_archive_is_found(shared_data, tmp_path):
    content = bytearray((shared_data / "ham10000_64.tar").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "ham10000_64.tar").write_bytes(content)
    assert any("ham10000_64.tar has the wrong checksum" in problem for problem in check("fed_isic2019", str(tmp_path)).problems)
