"""Archives are read within stated limits."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from polyfed.data.store import archives
from polyfed.data.store.archives import file_tree, read_npz
from polyfed.errors import DataError


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path.with_suffix(".zip")


def tarred(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path.with_suffix(".tgz"), "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path.with_suffix(".tgz")


def test_names_that_are_not_utf8_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with open(os.fsencode(tmp_path / "own") + b"/caf\xe9.png", "wb"):
        pass
    packed = tarred(tmp_path / "own", {"caf\udce9.png": b"1", "b.png": b"2"})
    for path in (tmp_path / "own", packed):
        with pytest.raises(DataError, match=r"the name caf\\xe9\.png is not UTF-8 text.*Rename this file"):
            file_tree(path).names  # noqa: B018


@pytest.mark.parametrize("made", [zipped, tarred])
def test_files_of_archives_have_a_largest_size(
    made: Callable[[Path, dict[str, bytes]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "LARGEST_MEMBER", 1000)
    tree = file_tree(made(tmp_path / "x", {"small": b"1" * 1000, "large": b"0" * 1001}))
    assert tree.read("small") == b"1" * 1000
    with pytest.raises(DataError, match=r"large in .* was not unpacked: it has 1,001 bytes, and the limit is 1,000"):
        tree.read("large")


@pytest.mark.parametrize("made", [zipped, tarred])
def test_archives_have_a_largest_number_of_files(
    made: Callable[[Path, dict[str, bytes]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    assert len(file_tree(made(tmp_path / "few", dict.fromkeys("abc", b"")).resolve()).names) == 3
    with pytest.raises(DataError, match="more than 3 files"):
        file_tree(made(tmp_path / "many", dict.fromkeys("abcd", b""))).names  # noqa: B018


def test_arrays_of_an_npz_file_have_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.arange(3), b=np.zeros(10_000))
    assert read_npz(tmp_path / "x.npz")["b"].shape == (10_000,)
    monkeypatch.setattr(archives, "LARGEST_MEMBER", 10_000)
    with pytest.raises(DataError, match=r"b\.npy in .* was not unpacked"):
        read_npz(tmp_path / "x.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        read_npz(tmp_path / "cut.npz")


@pytest.mark.parametrize("made", [zipped, tarred])
def test_forked_processes_read_one_archive_in_parallel(made: Callable[[Path, dict[str, bytes]], Path], tmp_path: Path) -> None:
    """A file opened before the fork would share its position between the processes."""
    files = {f"{number:03d}": bytes([number]) * 20_000 for number in range(200)}
    tree = file_tree(made(tmp_path / "x", files))
    tree.read("000")
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = int(any(tree.read(name) != content for _ in range(3) for name, content in files.items()))
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
