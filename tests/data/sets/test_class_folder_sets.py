"""Office-Home, VLCS and DomainNet-10 from tiny copies of their common layouts."""

from __future__ import annotations

import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyfed.data.check import check
from polyfed.data.registry import data_sets
from polyfed.data.sets import domainnet10, office_home, vlcs
from polyfed.errors import DataError, OptionError


def folders(root: Path, domains, classes, per_class: int = 4) -> None:
    random = np.random.default_rng(0)
    for domain in domains:
        for label in classes:
            (root / domain / label).mkdir(parents=True)
            for number in range(per_class):
                Image.fromarray(random.integers(0, 256, (6, 6, 3), np.uint8)).save(root / domain / label / f"{number:03d}.png")


@pytest.mark.parametrize(
    ("place", "domains"),
    [
        ("OfficeHomeDataset_10072016", ("Art", "Clipart", "Product", "Real World")),
        ("office_home", ("Art", "Clipart", "Product", "RealWorld")),
        (".", ("Art", "Clipart", "Product", "Real_World")),
    ],
)
def test_office_home(tmp_path, place, domains):
    folders(tmp_path / place, domains, office_home.CLASSES, 2)
    data = data_sets.build("office-home(size=6)", root=str(tmp_path))
    assert [domain.name for domain in data.domains] == ["art", "clipart", "product", "real_world"]
    assert len(data.classes) == 65 and len(data.domains[0].train) == 117
    assert (len(data.domains[0].validation), len(data.domains[0].test)) == (7, 6)


def test_office_home_in_its_archive(tmp_path):
    folders(tmp_path / "x" / "office_home", ("Art", "Clipart", "Product", "Real World"), office_home.CLASSES, 2)
    with zipfile.ZipFile(tmp_path / "office_home.zip", "w") as archive:
        for path in sorted((tmp_path / "x").rglob("*.png")):
            archive.write(path, path.relative_to(tmp_path / "x"))
    shutil.rmtree(tmp_path / "x")
    problems = check("office_home", str(tmp_path)).problems
    assert "art: 130 images, expected 2427." in problems and len(problems) == 4


@pytest.mark.parametrize("domains", [("Caltech101", "LabelMe", "SUN09", "VOC2007"), ("CALTECH", "LABELME", "SUN", "PASCAL")])
def test_vlcs(tmp_path, domains):
    folders(tmp_path / "VLCS", domains, vlcs.CLASSES)
    data = data_sets.build("vlcs(size=6)", root=str(tmp_path))
    assert [domain.name for domain in data.domains] == list(vlcs.DOMAINS)
    shutil.rmtree(tmp_path / "VLCS" / domains[3] / "dog")
    with pytest.raises(DataError, match="VOC2007 has no images of the class dog"):
        data_sets.build("vlcs(size=6)", root=str(tmp_path))


def test_vlcs_in_its_archive(tmp_path):
    folders(tmp_path / "x" / "VLCS", vlcs.DOMAINS, vlcs.CLASSES)
    with tarfile.open(tmp_path / "VLCS.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "x" / "VLCS", "VLCS")
    shutil.rmtree(tmp_path / "x")
    assert len(data_sets.build("vlcs(size=6)", root=str(tmp_path)).domains) == 4


def test_vlcs_of_the_packed_file(shared_data):
    assert check("vlcs", str(shared_data)).ok
    data = data_sets.build("vlcs(size=32)", root=str(shared_data))
    sizes = {d.name: len(d.train) + len(d.validation) + len(d.test) for d in data.domains}
    assert sizes == {"Caltech101": 55, "LabelMe": 77, "SUN09": 55}


def test_domainnet_with_fedbns_lists_and_without(tmp_path):
    base = tmp_path / "DomainNet"
    folders(base, [name.lower() for name in domainnet10.DOMAINS], domainnet10.CLASSES, 5)
    folders(base, ["real"], ["aircraft_carrier"], 2)  # one of the 335 other classes
    data = data_sets.build("domainnet10(size=6)", root=str(tmp_path))
    assert [(len(d.train), len(d.test)) for d in data.domains] == [(40, 10)] * 6
    for domain in domainnet10.DOMAINS:
        files = [f"{domain.lower()}/{p.parent.name}/{p.name}" for p in sorted((base / domain.lower()).glob("*/*.png"))]
        files = [name for name in files if "aircraft" not in name]
        for kind, chosen in (("train", files[10:]), ("test", files[:10])):
            labels = [name.split("/")[1] for name in chosen]
            (base / f"{domain.lower()}_{kind}.pkl").write_bytes(pickle.dumps((chosen, labels)))
    listed = data_sets.build('domainnet10(size=6, protocol="fedbn")', root=str(tmp_path))
    assert [(len(d.train), len(d.validation), len(d.test)) for d in listed.domains] == [(2, 2, 10)] * 6
    assert listed.domains[0].test.labels.tolist() == [0] * 5 + [1] * 5
    with pytest.raises(OptionError, match="validation has no effect"):
        data_sets.build('domainnet10(protocol="fedbn", validation=0.1)', root=str(tmp_path))


def test_domainnet_from_its_zips_is_what_it_is_from_the_folders(tmp_path):
    base, packed = tmp_path / "unpacked" / "DomainNet", tmp_path / "packed"
    names = [name.lower() for name in domainnet10.DOMAINS]
    folders(base, names, (*domainnet10.CLASSES, "zigzag"), 5)
    for name in names:
        shutil.make_archive(str(packed / name), "zip", base, name)
        files = [f"DomainNet/{path.relative_to(base)}" for path in sorted((base / name).glob("[!z]*/*.png"))]
        for kind, chosen in (("train", files[::2]), ("test", files[1::2])):
            for root in (packed, base):
                (root / f"{name}_{kind}.pkl").write_bytes(pickle.dumps((chosen, [file.split("/")[2] for file in chosen])))
    zipped, unpacked = (data_sets.build("domainnet10(size=6)", root=str(root)) for root in (packed, base.parent))
    for one, other in zip(zipped.domains, unpacked.domains, strict=True):
        assert one.name == other.name and len(one.train) == 23, "nine classes of five are listed, every second for training"
        for part in ("train", "test"):
            pairs = zip(*(getattr(domain, part).batch(slice(None)) for domain in (one, other)), strict=True)
            assert all((a == b).all() for a, b in pairs)
    assert "real.zip" in zipped.source and "FedBN's lists" in zipped.source
    (packed / "sketch.zip").unlink()
    with pytest.raises(DataError, match="has no images of the domain Sketch"):
        data_sets.build("domainnet10(size=6)", root=str(packed))


@pytest.mark.parametrize("name", ["office_home", "vlcs", "domainnet10"])
def test_an_empty_folder_lists_the_layouts(tmp_path, name):
    with pytest.raises(DataError, match=r"was not found.*is read from: \(1\) folder"):
        data_sets.build(name, root=str(tmp_path))
