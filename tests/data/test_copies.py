"""``polyfed data cache``: the copies of images in the cache are listed with their origin, and removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from helpers.command_line import Command, picture
from polyfed.data.own.own_data import own_data
from polyfed.data.store.archives import file_tree
from polyfed.data.store.cache import cache_folder
from polyfed.data.store.copies import UNKNOWN, list_copies
from polyfed.data.store.pixel_store import PixelStore

LONG_AGO = 1_000_000_000


def test_copies_are_listed_with_their_origin_and_removed(polyfed: Command, images: Path) -> None:
    assert polyfed("data", "cache").out.startswith("Found 0 copies")
    other = picture_folder(Path("elsewhere/scans"))
    own_data(str(images))
    own_data(str(other))
    found = polyfed("data", "cache", "--json").json
    assert {(row["data"], row["domain"], row["path"]) for row in found["copies"]} == {
        (path.name, domain, str(path.resolve())) for path in (images, other) for domain in ("day", "night")
    }
    on_disk = sum(file.stat().st_size for file in cache_folder().rglob("*") if file.is_file())
    assert on_disk <= found["bytes"] == sum(row["bytes"] for row in found["copies"]) < 2 * on_disk + 10**6
    assert not any(entry.stat().st_mode & 0o077 for entry in cache_folder().iterdir()), "other accounts cannot read them"
    shown = polyfed("data", "cache").out
    assert str(images.resolve()) in shown and "last use" in shown and "Found 4 copies" in shown
    cleared = polyfed("data", "cache", other, "--clear")
    assert "Removed 2 copies" in cleared.out and str(other.resolve()) in cleared.out and str(images.resolve()) not in cleared.out
    assert {row["path"] for row in polyfed("data", "cache", "--json").json["copies"]} == {str(images.resolve())}
    assert "Removed 2 copies" in polyfed("data", "cache", "--clear").out
    assert not [path for path in cache_folder().rglob("*") if path.is_file()], "no pixel of an image is left"
    assert len(own_data(str(images)).domains) == 2, "the images are decoded again"


def picture_folder(root: Path) -> Path:
    for domain in ("day", "night"):
        for label in ("disk", "stripe"):
            (root / domain / label).mkdir(parents=True)
            for number in range(10):
                picture(label, domain == "night", np.random.default_rng(number)).save(root / domain / label / f"{number}.png")
    return root


def test_the_last_use_is_that_of_the_last_run(polyfed: Command, images: Path) -> None:
    own_data(str(images))
    for about in cache_folder().glob("*/about.json"):
        os.utime(about, (LONG_AGO, LONG_AGO))
    assert {row["last_use"] for row in polyfed("data", "cache", "--json").json["copies"]} == {"2001-09-09 01:46"}
    own_data(str(images))
    assert all(row["last_use"] > "2020" for row in polyfed("data", "cache", "--json").json["copies"])


def test_streamed_images_and_entries_of_older_versions_are_copies_too(polyfed: Command, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "big" / "a.png")
    PixelStore("camelyon17/ward 1", file_tree(tmp_path / "big"), ["a.png"], 8).rows([0])
    old = cache_folder() / ("0" * 64)
    old.mkdir()
    (old / "about.json").write_text(json.dumps({"crc32": {}}))
    (cache_folder() / "notes.txt").write_text("not from polyfed")
    assert {(copy.data, copy.domain) for copy in list_copies()} == {("camelyon17", "ward 1"), (UNKNOWN, "")}
    assert [copy.root for copy in list_copies("camelyon17")] == [str(tmp_path / "big")]
    assert polyfed("data", "cache", "--clear").code == 0
    assert [path.name for path in cache_folder().iterdir()] == ["notes.txt"], "files of others stay"
