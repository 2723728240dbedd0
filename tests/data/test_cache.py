"""The cache of decoded arrays: built once, then mapped, and rebuilt if it is damaged or a file changes."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from polyfed.core.data_types import ArrayExamples, Examples
from polyfed.data.store import cache
from polyfed.data.store.archives import identities
from polyfed.data.store.examples import RowExamples
from polyfed.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Build:
    def __init__(self):
        self.times = 0
        self.x = np.random.default_rng(0).integers(0, 256, (500, 3, 32, 32), np.uint8)

    def __call__(self):
        self.times += 1
        return {"x": self.x, "y": np.arange(500)}


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def test_large_arrays_are_filled_in_a_file_and_stored_row_by_row(folder, monkeypatch):
    values = np.random.default_rng(0).integers(0, 256, (50, 3, 4), np.uint8)
    stored = []
    for bound in (1, 10**9):
        monkeypatch.setattr(cache, "IN_FILE_FROM_BYTES", bound)
        growing = cache.RowBuffer(values.shape)
        assert isinstance(growing.arrays[0], np.memmap) is (bound == 1)
        for row, pixels in enumerate(values):
            growing.arrays[0][row] = pixels
            growing.release_after(row)
        stored.append(cache.cached({"bound": bound}, [], lambda: {"x": growing.arrays[0]})["x"])  # noqa: B023
    assert np.array_equal(stored[0], values) and np.array_equal(stored[1], values)
    assert not [path for path in folder.iterdir() if path.is_file()], "the file has no name"


def test_built_once_and_then_mapped(folder):
    build = Build()
    first, second = (cache.cached({"a": 1}, [("file", 1, 2)], build) for _ in range(2))
    assert build.times == 1
    assert (second["x"] == build.x).all()
    assert (first["y"] == np.arange(500)).all()
    assert isinstance(second["x"], np.memmap)
    assert [path.name for path in folder.iterdir()] == [entries(folder)[0].name], "nothing is left next to the entry"


def test_a_mapped_array_becomes_a_tensor_without_warning_and_writing_to_it_stays_here(folder):
    build = Build()
    x = cache.cached({}, [], build)["x"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = torch.from_numpy(x)
    tensor[0] = 7
    assert (cache.cached({}, [], build)["x"] == build.x).all()
    assert build.times == 1


@pytest.mark.parametrize("change", ["path", "bytes", "time", "recipe", "version"])
def test_anything_that_changes_makes_a_new_entry(folder, change, monkeypatch):
    build = Build()
    cache.cached({"size": 1}, [("file", 1, 2)], build)
    if change == "version":
        monkeypatch.setattr(cache, "RECIPE_VERSION", 99)
    file = {"path": ("other", 1, 2), "bytes": ("file", 9, 2), "time": ("file", 1, 9)}.get(change, ("file", 1, 2))
    cache.cached({"size": 2 if change == "recipe" else 1}, [file], build)
    assert build.times == 2
    assert len(entries(folder)) == 2


def test_a_file_written_again_has_another_identity(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one")
    before = identities([path])
    path.write_bytes(b"two")
    os.utime(path, ns=(0, before[0][2] + 1))
    assert identities([path]) != before


def flip_a_byte(entry):
    content = bytearray((entry / "x.npy").read_bytes())
    content[len(content) // 2] ^= 1
    (entry / "x.npy").write_bytes(content)


DAMAGE = {
    "a flipped bit": flip_a_byte,
    "cut off": lambda entry: os.truncate(entry / "x.npy", 1000),
    "an array is gone": lambda entry: (entry / "y.npy").unlink(),
    "about.json is gone": lambda entry: (entry / "about.json").unlink(),
    "about.json is nonsense": lambda entry: (entry / "about.json").write_text('{"crc32": []}'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_again(folder, damage, caplog):
    build = Build()
    cache.cached({}, [], build)
    DAMAGE[damage](entries(folder)[0])
    again = cache.cached({}, [], build)
    assert build.times == 2
    assert (again["x"] == build.x).all()
    assert "damaged" in caplog.text
    cache.cached({}, [], build)
    assert build.times == 2
    assert len(list(folder.iterdir())) == 1


def test_a_build_that_fails_leaves_nothing(folder):
    def fails():
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        cache.cached({}, [], fails)
    assert not folder.exists() or not list(folder.iterdir())


def test_an_entry_another_process_made_meanwhile_is_kept(folder):
    build = Build()

    def slow():
        cache.cached({}, [], build)
        return build()

    assert (cache.cached({}, [], slow)["x"] == build.x).all()
    assert len(list(folder.iterdir())) == 1


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="POLYFED_CACHE"):
        cache.cached({}, [], Build())


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("POLYFED_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "polyfed"


def test_row_examples_select_rows_and_share_memory():
    x, y = torch.arange(20).view(10, 2).to(torch.uint8), torch.arange(10) % 3
    examples = RowExamples(x, y, torch.tensor([9, 0, 4]))
    assert isinstance(examples, Examples)
    assert len(examples) == 3
    assert examples.labels.tolist() == [0, 0, 1]
    inputs, labels = examples.batch(slice(1, 3))
    assert inputs.tolist() == [[0, 1], [8, 9]]
    assert labels.tolist() == [0, 1]
    part = examples.subset(torch.tensor([2, 0]))
    assert part.batch(torch.tensor([1]))[0].tolist() == [[18, 19]]
    assert part.x.data_ptr() == x.data_ptr()


def test_pickled_row_examples_contain_only_their_rows():
    x = torch.zeros(10_000, 100, dtype=torch.uint8)
    sent = pickle.dumps(RowExamples(x, torch.zeros(10_000), torch.tensor([3])))
    assert len(sent) < 10_000
    assert isinstance(pickle.loads(sent), ArrayExamples)
