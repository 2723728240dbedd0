"""Camelyon17, Tiny-ImageNet and ImageNet from tiny copies of their layouts; images that are decoded when they are needed."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import polyfed
from polyfed.core.data_types import joined
from polyfed.data.check import check
from polyfed.data.partitions.federate import federate
from polyfed.data.registry import data_sets
from polyfed.data.sets import imagenet, tiny_imagenet
from polyfed.data.store.pixel_store import PixelStore, StoredExamples
from polyfed.errors import DataError
from polyfed.runs.export import export_model
from polyfed.runs.predict import ImageInputs, read_images

RANDOM = np.random.default_rng(0)


def image(path: Path, side: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RANDOM.integers(0, 256, (side, side, 3), np.uint8)).save(path, "PNG")


@pytest.fixture
def camelyon(tmp_path) -> Path:
    """Five hospitals, four patients each with four patches."""
    base = tmp_path / "camelyon17_v1.0"
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for center in range(5):
        for patient in range(center * 20, center * 20 + 4):
            for patch in range(4):
                slide = f"patient_{patient:03d}_node_1"
                image(base / "patches" / slide / f"patch_{slide}_x_{patch}_y_7.png", 6)
                lines.append(f"{len(lines)},{patient:03d},1,{patch},7,{patch % 2},0,{center},0")
    (base / "metadata.csv").write_text("\n".join(lines))
    return tmp_path


def test_camelyon17_by_image_and_by_patient(camelyon):
    data = data_sets.build("camelyon17(size=6)", root=str(camelyon))
    assert [domain.name for domain in data.domains] == [f"hospital {number}" for number in range(1, 6)]
    assert [(len(d.train), len(d.validation), len(d.test)) for d in data.domains] == [(12, 2, 2)] * 5
    by_patient = data_sets.build('camelyon17(size=6, split="patients")', root=str(camelyon))
    for domain in by_patient.domains:
        patients = [
            set((part.positions // 4).tolist()) for part in (domain.train, domain.validation, domain.test) if part is not None
        ]
        assert sum(map(len, patients)) == 4, "four patients, each in one part"
    patches = camelyon / "camelyon17_v1.0" / "patches"
    with Image.open(patches / "patient_000_node_1" / "patch_patient_000_node_1_x_0_y_7.png") as first:
        everything = federate(data, unseen=["hospital 1"], unseen_part="all").unseen["hospital 1"]
        assert isinstance(everything, StoredExamples) and len(everything) == 16
        at = int((everything.positions == 0).nonzero())
        assert (everything.batch(slice(at, at + 1))[0][0].numpy() == np.asarray(first).transpose(2, 0, 1)).all()


def test_camelyon17_missing_patches_are_named(camelyon):
    slide = "patient_020_node_1"
    (camelyon / "camelyon17_v1.0" / "patches" / slide / f"patch_{slide}_x_2_y_7.png").unlink()
    with pytest.raises(DataError, match=r"1 patches of hospital 2 are listed.*patient_020_node_1_x_2_y_7"):
        data_sets.build("camelyon17(size=6)", root=str(camelyon))
    problems = " ".join(check("camelyon17", str(camelyon)).problems)
    assert "1 patches of hospital 2" in problems and "hospital 1: 16 images, expected 59436" in problems
    (camelyon / "camelyon17_v1.0" / "metadata.csv").write_text("patient,node\n1,2\n")
    with pytest.raises(DataError, match="lacks the columns x_coord, y_coord, tumor, center"):
        data_sets.build("camelyon17", root=str(camelyon))


@pytest.fixture
def three_classes(monkeypatch):
    """The declarations with three classes, so that copies can be small."""
    for module, name in ((tiny_imagenet, "TINY_IMAGENET"), (imagenet, "IMAGENET")):
        monkeypatch.setattr(module, "NUMBER", 3)
        declared = getattr(module, name)
        usual = ("a", "b", "c")
        names = functools.partial(declared.class_names, default=usual)
        small = dataclasses.replace(declared, classes=usual, class_names=names, expected={})
        monkeypatch.setitem(data_sets.find(declared.name).extra, "declaration", small)


def built(name: str, root: Path, **options):
    declaration = data_sets.find(name).extra["declaration"]
    defaults = {option.name: option.default for option in declaration.options}
    return declaration.build(str(root), **{**defaults, "size": 8, **options})


IDS = ("n01443537", "n01629819", "n02123045")


@pytest.mark.parametrize("zipped", [False, True])
def test_tiny_imagenet_as_published(tmp_path, three_classes, zipped):
    base = tmp_path / "tiny-imagenet-200"
    for wordnet in IDS:
        for number in range(6):
            image(base / "train" / wordnet / "images" / f"{wordnet}_{number}.JPEG")
    lines = []
    for number in range(6):
        image(base / "val" / "images" / f"val_{number}.JPEG")
        lines.append(f"val_{number}.JPEG\t{IDS[number % 3]}\t0\t0\t1\t1")
    (base / "val" / "val_annotations.txt").write_text("\n".join(lines))
    if zipped:
        with zipfile.ZipFile(tmp_path / "tiny-imagenet-200.zip", "w") as archive:
            for path in sorted(base.rglob("*.*")):
                archive.write(path, path.relative_to(tmp_path))
                path.unlink()
        for folder in sorted(base.rglob("*"), reverse=True):
            folder.rmdir()
        base.rmdir()
    data = built("tiny_imagenet", tmp_path, validation=1 / 3)
    (domain,) = data.domains
    assert data.classes == IDS
    assert domain.test.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert domain.validation.labels.bincount().tolist() == [2, 2, 2] and len(domain.train) == 12
    assert domain.train.batch(slice(0, 2))[0].shape == (2, 3, 8, 8)


def test_imagenet_as_torchvision_unpacks_it(tmp_path, three_classes):
    for number, wordnet in enumerate(IDS):
        for image_number in range(4):
            image(tmp_path / "imagenet" / "train" / wordnet / f"{wordnet}_{image_number}.JPEG", 12)
        image(tmp_path / "imagenet" / "val" / wordnet / f"ILSVRC2012_val_{number:08d}.JPEG", 10)
    data = built("imagenet", tmp_path)
    assert data.classes == IDS and data.domains[0].test.labels.tolist() == [0, 1, 2]
    assert len(data.domains[0].train) == 12
    image(tmp_path / "imagenet" / "val" / "ILSVRC2012_val_00000009.JPEG")
    with pytest.raises(DataError, match=r"class of 1 validation images is unknown: .*00000009\.JPEG\. Move them to val/<id>/\."):
        built("imagenet", tmp_path)


def test_imagenets_archive_must_be_unpacked(tmp_path):
    (tmp_path / "ILSVRC2012_img_train.tar").touch()
    with pytest.raises(DataError, match=r"img_train\.tar is not unpacked\. Unpack it .* torchvision\.datasets\.ImageNet or tar"):
        built("imagenet", tmp_path)


class Counting:
    """A tree that counts how often files are read."""

    def __init__(self, tree) -> None:
        self.tree, self.path, self.names, self.reads = tree, tree.path, tree.names, 0

    def read(self, name):
        self.reads += 1
        return self.tree.read(name)

    def identity(self, names):
        return self.tree.identity(names)


@pytest.fixture
def store(tmp_path) -> PixelStore:
    from polyfed.data.store.archives import FolderTree

    for number in range(6):
        image(tmp_path / "files" / f"{number}.png")
    tree = FolderTree(tmp_path / "files")
    return PixelStore("test", Counting(tree), tree.names, 8)


def test_an_image_is_decoded_once_and_again_when_its_file_changes(store):
    first = store.rows(range(6))
    assert store.tree.reads == 6
    again = PixelStore(store.name, store.tree, store.names, store.size)
    assert (again.rows(range(6)) == first).all() and store.tree.reads == 6
    image(store.tree.path / "2.png")
    assert (again.rows([2])[0] != first[2]).any() and store.tree.reads == 7
    assert (again.rows([2, 3])[1] == first[3]).all() and store.tree.reads == 7


def test_damaged_pixels_are_made_again(store):
    first = store.rows(range(6))
    with store.path.open("r+b") as file:
        file.seek(3 * store.bytes_each + 5)
        file.write(bytes([255 - int(first[3].flatten()[5])]))
    assert (store.rows([3])[0] == first[3]).all() and store.tree.reads == 7


def test_the_store_is_bounded(store, monkeypatch):
    monkeypatch.setenv("POLYFED_CACHE_GB", str(4 * store.bytes_each / 10**9))
    first = store.rows(range(6))
    assert store.slots == 4 and store.path.stat().st_size == 4 * store.bytes_each
    assert (store.rows(range(6)) == first).all() and store.tree.reads == 8, "two have no slot"
    monkeypatch.setenv("POLYFED_CACHE_GB", "much")
    with pytest.raises(DataError, match="must be a number of gigabytes"):
        PixelStore("other", store.tree, store.names, 8).rows([0])


def test_a_store_survives_a_fork_and_a_pickle(store):
    first = store.rows(range(3))
    child = os.fork()
    if child == 0:
        os._exit(0 if (store.rows(range(6))[:3] == first).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (store.rows(range(6))[:3] == first).all() and store.tree.reads == 3, "the child decoded the others"
    plain = PixelStore(store.name, store.tree.tree, store.names, store.size)
    assert (pickle.loads(pickle.dumps(plain)).rows([1]) == plain.rows([1])).all()


def test_joined_examples_stay_on_disk(store, tmp_path):
    def examples(store, positions):
        at = torch.tensor(positions)
        return StoredExamples((store,), torch.zeros_like(at), at, at % 2)

    other = PixelStore("other", store.tree, store.names[::-1], 8)
    both = joined([examples(store, [0, 1]), examples(other, [0]), examples(store, [4])])
    assert isinstance(both, StoredExamples) and store.tree.reads == 0 and len(both.stores) == 2
    x, y = both.subset(torch.tensor([3, 2, 0])).batch(slice(None))
    assert (x == store.rows([4, 5, 0])).all() and y.tolist() == [0, 0, 0]


def test_predict_and_export_read_images_as_training_did(camelyon, tmp_path):
    """Images that are not square are cut to their middle square where the data set does so, also by a run that is opened again."""
    wide = sorted((camelyon / "camelyon17_v1.0" / "patches").rglob("*.png"))[0]
    Image.fromarray(RANDOM.integers(0, 256, (20, 50, 3), np.uint8)).save(wide)
    text = "camelyon17(size=16)"
    domain = data_sets.build(text, root=str(camelyon)).domains[0]
    store = domain.train.stores[0]
    expected = store.rows([[Path(name).name for name in store.names].index(wide.name)])[0]

    polyfed.run(text, root=str(camelyon), model="small_cnn", rounds=1, local_steps=1, batch_size=4, out=tmp_path / "r")
    opened = polyfed.open_run(tmp_path / "r").experiment
    assert opened.federation.preparation.middle_square
    read, problems = read_images([str(wide)], ImageInputs.of(opened.federation))
    assert not problems and torch.equal(read[str(wide)], expected)
    assert not torch.equal(ImageInputs(3, 16, 16).tensor(str(wide))[0], expected), "stretched, it is another image"
    found = export_model(opened, "safetensors", tmp_path / "m.safetensors")
    assert json.loads(found.metadata["resized"]) == {"middle_square": True, "resampling": "bilinear"}
    answers = polyfed.open_run(tmp_path / "r").predict([wide])[0].probabilities
    model = polyfed.open_run(tmp_path / "r").newcomer()
    with torch.no_grad():
        direct = model(opened.federation.preparation.for_testing(expected[None])).softmax(1)[0]
    assert list(answers.values()) == pytest.approx(direct.tolist(), abs=1e-5)


def test_a_run_on_streamed_images(camelyon):
    result, again = (
        polyfed.run("camelyon17(size=16)", root=str(camelyon), model="small_cnn", rounds=1, batch_size=6) for _ in range(2)
    )
    assert result.digest == again.digest and len(result.experiment.federation.clients) == 5
