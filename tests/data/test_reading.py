"""The pieces that read: archives, images, splits and the digit sets' own file formats."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polyfed.data.formats.digit_files import read_idx, read_libsvm, read_mat
from polyfed.data.store.archives import contents, existing_trees, file_tree
from polyfed.data.store.images import Resizer, colour, decode, decode_all, opened, resized, tiles
from polyfed.data.store.splits import stratified, without_end
from polyfed.errors import DataError

FILES = {"a/x.txt": b"one", "a/b/y.txt": b"two", "z": b""}
HIDDEN = {"a/._x.txt": b"", ".DS_Store": b"", "__MACOSX/a": b""}


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def noise(height=16, width=16, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.fixture(params=["folder", "tar", "tar.gz", "zip"])
def tree(request, tmp_path):
    path = tmp_path / f"files.{request.param}"
    everything = {**FILES, **HIDDEN}
    if request.param == "folder":
        for name, content in everything.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    elif request.param == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in everything.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz" if request.param == "tar.gz" else "w") as archive:
            for name, content in everything.items():
                info = tarfile.TarInfo("./" + name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            link = tarfile.TarInfo("a/link")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(link)
    return file_tree(path)


def test_all_trees_read_alike(tree):
    assert tree.names == ["a/b/y.txt", "a/x.txt", "z"]
    assert {name: tree.read(name) for name in tree.names} == FILES
    assert tree.identity(["z"])[0][0].startswith(str(tree.path.resolve()))
    with pytest.raises(DataError):
        tree.read("none")


def test_damaged_archives_are_named(tmp_path):
    for ending in ("tar", "tar.gz", "zip"):
        path = tmp_path / f"bad.{ending}"
        path.write_bytes(b"not an archive" * 100)
        with pytest.raises(DataError, match=r"bad\."):
            _ = file_tree(path).names
    path = tmp_path / "cut.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("big")
        info.size = 100_000
        archive.addfile(info, io.BytesIO(bytes(100_000)))
    os.truncate(path, 50_000)
    with pytest.raises(DataError, match=r"cut\.tar"):
        file_tree(path).read("big")


def test_what_a_folder_holds(tmp_path):
    assert "does not exist" in contents(tmp_path / "none")
    assert "empty" in contents(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_text("")
    assert contents(tmp_path) == "the folder contains a/, b"
    assert "not a folder" in contents(tmp_path / "b")
    assert existing_trees(tmp_path, ["b", "none"]) == [], "a plain file is no tree"


def test_an_image_of_the_right_size_is_not_touched():
    image = noise()
    assert (decode(encoded(image), "a.png", 16) == np.asarray(image).transpose(2, 0, 1)).all()


def test_resizing_is_pillows_bilinear():
    image = noise(20, 30)
    expected = np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert (decode(encoded(image), "a.png", 8) == expected).all()
    stack = np.asarray(image).transpose(2, 0, 1)[None]
    assert (resized(stack, 8)[0] == expected).all()


def test_the_middle_square_is_cut_out():
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:, 5:15] = 200
    assert (decode(encoded(Image.fromarray(pixels)), "a.png", 10, middle_square=True) == 200).all()


def test_grey_is_repeated():
    grey = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4)
    result = colour(grey, 4)
    assert result.shape == (2, 3, 4, 4)
    assert (result == grey[:, None]).all()
    with pytest.raises(DataError, match="float64"):
        colour(np.zeros((2, 4, 4)), 4)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_mode_becomes_three_channels(mode):
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert decode(encoded(noise().convert(mode), kind), "a", 16).shape == (3, 16, 16)


def test_sixteen_bit_grey_keeps_its_range():
    deep = Image.fromarray((np.arange(256, dtype=np.uint16) * 257).reshape(16, 16))
    found = decode(encoded(deep), "deep.png", 16)
    assert (found[0].ravel() == np.arange(256)).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_images_are_named(kind, share):
    content = encoded(noise(64, 64), kind)
    assert opened(content, "whole").size == (64, 64)
    with pytest.raises(DataError, match=r"bad\.img"):
        opened(content[: int(len(content) * share)], "bad.img")


def test_what_cannot_be_read_is_listed_and_left_out(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(b"no image" if number == 1 else encoded(noise(seed=number)))
    unreadable: list[str] = []
    x, kept = decode_all(file_tree(tmp_path), [f"{n}.png" for n in range(4)], Resizer((16, 16)), unreadable)
    assert kept.tolist() == [0, 2, 3]
    assert len(unreadable) == 1
    assert "1.png" in unreadable[0]
    assert (x[1] == np.asarray(noise(seed=2)).transpose(2, 0, 1)).all()


def test_tiles_of_a_mosaic():
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), np.uint8)
    mosaic = np.zeros((16, 24, 3), np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number, 3)
        mosaic[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] = image
    found = tiles(encoded(Image.fromarray(mosaic)), "m", 8, 5)
    assert (found == images.transpose(0, 3, 1, 2)).all()
    with pytest.raises(DataError, match="tiles"):
        tiles(encoded(Image.fromarray(mosaic)), "m", 8, 7)


@given(st.lists(st.integers(0, 4), min_size=0, max_size=200), st.floats(0, 0.9), st.integers(0, 5))
def test_stratified_parts_every_class(labels, share, seed):
    y = np.array(labels, np.int64)
    rest, part = stratified(y, share, seed)
    assert sorted([*rest, *part]) == list(range(len(y)))
    assert set(y[rest]) == set(y)
    target = min(int(np.ceil(round(len(y) * share, 9))), len(y) - len(set(labels)))
    assert len(part) == max(target, 0)
    numbers = {label: labels.count(label) for label in labels}
    if all(int(share * number) < number - 1 for number in numbers.values()):  # else another class gives what one cannot
        assert all(abs((y[part] == label).sum() - share * number) <= 1 + 1e-9 for label, number in numbers.items())
    again = stratified(y, share, seed)
    assert (again[0] == rest).all()
    assert (again[1] == part).all()


def test_stratified_depends_on_the_seed():
    y = np.repeat(np.arange(3), 50)
    assert (stratified(y, 0.2, 0)[1] != stratified(y, 0.2, 1)[1]).any()


def test_the_end_is_taken():
    kept, taken = without_end(np.arange(10), 0.3)
    assert kept.tolist() == list(range(7))
    assert taken.tolist() == [7, 8, 9]
    assert len(without_end(np.arange(10), 0.0)[1]) == 0


def test_idx(tmp_path):
    content = bytes((0, 0, 8, 2)) + (2).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes(range(6))
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    for name in ("a", "a.gz"):
        assert read_idx(tmp_path / name).tolist() == [[0, 1, 2], [3, 4, 5]]
    for number, bad in enumerate([content[:-1], b"", b"\x00\x00\x0d\x01" + content[4:]]):
        (tmp_path / f"bad{number}").write_bytes(bad)
        with pytest.raises(DataError, match=f"bad{number}"):
            read_idx(tmp_path / f"bad{number}")
    (tmp_path / "bad.gz").write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(DataError, match=r"bad\.gz"):
        read_idx(tmp_path / "bad.gz")


def test_mat(tmp_path):
    from scipy.io import savemat

    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), np.uint8)
    savemat(tmp_path / "a.mat", {"X": images.transpose(1, 2, 3, 0), "y": np.array([[1], [10], [3], [9], [10]])})
    x, y = read_mat(tmp_path / "a.mat")
    assert (x == images).all()
    assert y.tolist() == [1, 0, 3, 9, 0]
    savemat(tmp_path / "b.mat", {"Z": np.zeros(3)})
    (tmp_path / "c.mat").write_bytes((tmp_path / "a.mat").read_bytes()[:300])
    for name in ("b", "c"):
        with pytest.raises(DataError, match=rf"{name}\.mat"):
            read_mat(tmp_path / f"{name}.mat")


def test_libsvm_goes_by_the_number_before_the_colon(tmp_path):
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(b"7 1:-1 2:1 256:0.5\n1 16:-0.25\n"))
    x, y = read_libsvm(tmp_path / "usps.bz2")
    assert y.tolist() == [6, 0]
    assert x.shape == (2, 16, 16)
    assert [x[0, 0, 0], x[0, 0, 1], x[0, 15, 15], x[0, 0, 2]] == [0, 255, 191, 127]
    assert x[1, 0, 15] == 95
    (tmp_path / "bad.bz2").write_bytes(bz2.compress(b"7 a:b\n"))
    with pytest.raises(DataError, match=r"bad\.bz2"):
        read_libsvm(tmp_path / "bad.bz2")
