"""Camelyon17, Tiny-ImageNet and ImageNet from tiny copies of their layouts; images that are decoded when they are needed."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

import polyfed
from polyfed.cli.predict import read_images
from polyfed.core.data_types import joined
from polyfed.data import archives, tar_of_tars
from polyfed.data.check import check
from polyfed.data.federate import federate
from polyfed.data.pixel_store import PixelStore, StoredExamples
from polyfed.data.registry import data_sets
from polyfed.data.sets import imagenet, tiny_imagenet
from polyfed.errors import DataError
from polyfed.runs.export import export_model
from polyfed.runs.image_inputs import ImageInputs

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path_factory.mktemp("cache")))


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
    with Image.open(
        camelyon / "camelyon17_v1.0" / "patches" / "patient_000_node_1" / "patch_patient_000_node_1_x_0_y_7.png"
    ) as first:
        everything = federate(data, unseen=["hospital 1"], unseen_part="all").unseen["hospital 1"]
        assert isinstance(everything, StoredExamples) and len(everything) == 16
        at = int((everything.positions == 0).nonzero())
        assert (everything.batch(slice(at, at + 1))[0][0].numpy() == np.asarray(first).transpose(2, 0, 1)).all()


def test_camelyon17_missing_patches_are_named(camelyon):
    slide = "patient_020_node_1"
    (camelyon / "camelyon17_v1.0" / "patches" / slide / f"patch_{slide}_x_2_y_7.png").unlink()
    with pytest.raises(DataError, match=r"1 patches of hospital 2 are named.*patient_020_node_1_x_2_y_7"):
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
        names = (
            dataclasses.replace(declared.class_names) if dataclasses.is_dataclass(declared.class_names) else declared.class_names
        )
        usual = ("a", "b", "c")
        small = dataclasses.replace(
            declared, classes=usual, class_names=lambda root, names=names, usual=usual: names(root, usual=usual), expected={}
        )
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


@pytest.mark.parametrize("kaggle", [False, True])
def test_imagenet_as_torchvision_and_kaggle_have_it(tmp_path, three_classes, kaggle):
    base = tmp_path / ("ILSVRC/Data/CLS-LOC" if kaggle else "imagenet")
    lines = ["ImageId,PredictionString"]
    for number, wordnet in enumerate(IDS):
        for image_number in range(4):
            image(base / "train" / wordnet / f"{wordnet}_{image_number}.JPEG", 12)
        image(base / "val" / ("" if kaggle else wordnet) / f"ILSVRC2012_val_{number:08d}.JPEG", 10)
        lines.append(f"ILSVRC2012_val_{number:08d},{wordnet} 1 2 3 4 {wordnet} 5 6 7 8 ")
    if kaggle:
        (tmp_path / "LOC_val_solution.csv").write_text("\n".join(lines))
    data = built("imagenet", tmp_path)
    assert data.classes == IDS and data.domains[0].test.labels.tolist() == [0, 1, 2]
    assert len(data.domains[0].train) == 12
    if kaggle:
        (tmp_path / "LOC_val_solution.csv").unlink()
        with pytest.raises(DataError, match="class of 3 validation images is not known"):
            built("imagenet", tmp_path)


def tar(path: Path, files: dict[str, bytes]) -> bytes:
    """A tar of these files; written, and as bytes."""
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.read_bytes()


def development_kit(folder: Path, ids: tuple[str, ...], numbers: list[int]) -> None:
    """The kit's two files; ids have numbers in another order than their names, and number 9 is no leaf of the tree of words."""
    folder.mkdir(parents=True)
    names = ("ILSVRC2012_ID", "WNID", "words")
    synsets = np.array(
        [(number, wordnet, "a word") for number, wordnet in ((2, ids[0]), (1, ids[1]), (3, ids[2]), (9, "n00001740"))],
        dtype=[(name, object) for name in names],
    )
    scipy.io.savemat(folder / "meta.mat", {"synsets": synsets[:, None]})
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(map(str, numbers)) + "\n")


@pytest.fixture
def imagenet_archives(tmp_path) -> Path:
    """A tar with a tar for each class, and one of validation images, as they are downloaded; no list of classes yet."""
    classes, pictures = {}, {}
    for wordnet in IDS:
        inner = {}
        for number in range(4):
            image(tmp_path / "one.png", 12)
            inner[f"{wordnet}_{number}.JPEG"] = (tmp_path / "one.png").read_bytes()
        classes[f"{wordnet}.tar"] = tar(tmp_path / "inner.tar", inner)
        pictures |= {f"{wordnet}/{name}": content for name, content in inner.items()}
    (tmp_path / "down").mkdir()
    tar(tmp_path / "down" / "ILSVRC2012_img_train.tar", classes)
    tested = {
        f"ILSVRC2012_val_{number:08d}.JPEG": pictures[f"{IDS[number % 3]}/{IDS[number % 3]}_0.JPEG"] for number in range(1, 6)
    }
    tar(tmp_path / "down" / "ILSVRC2012_img_val.tar", tested)
    for name, content in pictures.items():
        path = tmp_path / "unpacked" / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "unpacked" / "val").mkdir()
    for name, content in tested.items():
        (tmp_path / "unpacked" / "val" / name).write_bytes(content)
    return tmp_path


LABELS = [1, 2, 0, 1, 2]
"""The class of each of the five validation images: they show what IDS[number % 3] shows, for the numbers 1 to 5."""


def give_list(folder: Path, kind: str) -> None:
    ids = [IDS[label] for label in LABELS]
    if kind.startswith("kit"):
        development_kit(folder / "ILSVRC2012_devkit_t12" / "data", IDS, [{0: 2, 1: 1, 2: 3}[label] for label in LABELS])
        if kind == "kit in its archive":
            with tarfile.open(folder / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
                archive.add(folder / "ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12")
            shutil.rmtree(folder / "ILSVRC2012_devkit_t12")
    elif kind == "torchvision":
        torch.save((dict.fromkeys(IDS, ("a", "b")), ids), folder / "meta.bin")
    else:
        (folder / "imagenet_2012_validation_synset_labels.txt").write_text("\n".join(ids) + "\n")


@pytest.mark.parametrize("kind", ["kit", "kit in its archive", "torchvision", "ids"])
def test_imagenet_from_its_archives_is_what_it_is_unpacked(imagenet_archives, three_classes, kind):
    found = []
    for place in ("down", "unpacked"):
        give_list(imagenet_archives / place, kind)
        found.append(built("imagenet", imagenet_archives / place, size=12))
    packed, unpacked = found
    assert packed.classes == unpacked.classes == IDS
    for part in ("train", "test"):
        (x, y), (other_x, other_y) = (getattr(data.domains[0], part).batch(slice(None)) for data in found)
        assert torch.equal(x, other_x) and torch.equal(y, other_y)
    assert packed.domains[0].test.labels.tolist() == LABELS and len(packed.domains[0].train) == 12


def test_imagenets_archive_is_walked_once_and_again_when_it_changes(imagenet_archives, three_classes, monkeypatch):
    give_list(imagenet_archives / "down", "ids")
    built("imagenet", imagenet_archives / "down")
    walks = []
    walk = tar_of_tars._files_in
    monkeypatch.setattr(tar_of_tars, "_files_in", lambda path: walks.append(path.name) or walk(path))
    store = built("imagenet", imagenet_archives / "down").domains[0].train.stores[0]
    assert walks == [] and (pickle.loads(pickle.dumps(store)).rows([1]) == store.rows([1])).all()
    os.utime(imagenet_archives / "down" / "ILSVRC2012_img_val.tar", (1, 1))
    built("imagenet", imagenet_archives / "down")
    assert walks == ["ILSVRC2012_img_val.tar"]


def test_imagenets_archives_that_cannot_be_used_are_told(imagenet_archives, three_classes):
    down = imagenet_archives / "down"
    with pytest.raises(DataError, match="class of 5 validation images is not known"):
        built("imagenet", down)
    (down / "meta.bin").write_bytes(b"not a list")
    with pytest.raises(DataError, match=r"meta\.bin cannot be read as the list that torchvision makes"):
        built("imagenet", down)
    (down / "meta.bin").unlink()
    give_list(down, "ids")
    whole = (down / "ILSVRC2012_img_train.tar").read_bytes()
    (down / "ILSVRC2012_img_train.tar").write_bytes(gzip.compress(whole))
    with pytest.raises(DataError, match=r"img_train\.tar is no tar archive, is compressed or damaged"):
        built("imagenet", down)
    (down / "ILSVRC2012_img_train.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"img_train\.tar is no tar archive, is compressed or damaged: unexpected end of data"):
        built("imagenet", down)


def test_files_of_an_inner_tar_end_where_it_ends(tmp_path):
    """The header of an inner file that promises more bytes than its tar has would read the next class."""
    content = b"x" * 1000
    inner = bytearray(tar(tmp_path / "inner.tar", {"a.JPEG": content}))
    header = tarfile.TarInfo("a.JPEG")
    header.size = 30_000
    inner[:512] = header.tobuf(tarfile.USTAR_FORMAT)
    tar(tmp_path / "outer.tar", {"n00000001.tar": bytes(inner), "n00000002.tar": tar(tmp_path / "inner.tar", {"b.JPEG": content})})
    with pytest.raises(DataError, match="unexpected end of data"):
        tar_of_tars.TarOfTars(tmp_path / "outer.tar", "train").names  # noqa: B018


def test_a_tar_of_tars_holds_no_more_files_than_are_read(tmp_path, monkeypatch):
    tar(tmp_path / "outer.tar", {"n00000001.tar": tar(tmp_path / "inner.tar", {f"{number}.JPEG": b"1" for number in range(9)})})
    assert len(tar_of_tars.TarOfTars(tmp_path / "outer.tar", "train").names) == 9
    monkeypatch.setattr(archives, "MOST_MEMBERS", 8)
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "other"))
    with pytest.raises(DataError, match="holds more than 8 files"):
        tar_of_tars.TarOfTars(tmp_path / "outer.tar", "train").names  # noqa: B018


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
    from polyfed.data.archives import FolderTree

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


def test_every_streamed_or_square_set_says_so_and_others_do_not(camelyon):
    assert data_sets.build("camelyon17(size=6)", root=str(camelyon)).preparation.middle_square
    assert not data_sets.build("digits-mini(per_domain=10)").preparation.middle_square


def test_a_run_on_streamed_images(camelyon):
    result = polyfed.run("camelyon17(size=16)", root=str(camelyon), method="fedavg", model="small_cnn", rounds=1, batch_size=6)
    again = polyfed.run("camelyon17(size=16)", root=str(camelyon), method="fedavg", model="small_cnn", rounds=1, batch_size=6)
    assert result.digest == again.digest and len(result.experiment.federation.clients) == 5
