"""``polyfed data check`` on a folder or table of images."""

from __future__ import annotations

import os
import shutil
import tarfile

import numpy as np
from PIL import Image

from helpers.command_line import says
from polyfed.data.check import check


def test_a_sound_folder(polyfed, images):
    shown = polyfed("data", "check", images, "--sheet", "sheet.png")
    assert shown.code == 0 and "80 images, 2 domains, 2 classes, no problems" in shown.out
    assert "PNG RGB 80" in shown.out and "20x20" in shown.out
    with Image.open("sheet.png") as sheet:
        assert sheet.height == 4 * 68 and np.asarray(sheet).std() > 10
    found = polyfed("data", "check", images, "--json").json
    assert found["ok"] and found["counts"]["day"] == {"all": [20, 20], "train": [14, 14], "validation": [2, 2], "test": [4, 4]}


def test_duplicates_across_splits_and_domains(polyfed, images):
    root = images.parent / "split"
    for path in sorted(images.rglob("*.png")):
        split = "train" if int(path.stem) < 15 else "test"
        target = root / split / path.relative_to(images)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    assert polyfed("data", "check", root).code == 0
    shutil.copy(root / "test" / "day" / "disk" / "17.png", root / "test" / "night" / "disk" / "copy.png")
    result = check(str(root))
    assert result.ok and "1 image is in more than one domain" in result.notes[0]
    (root / "test" / "night" / "disk" / "copy.png").unlink()
    with Image.open(root / "train" / "day" / "disk" / "03.png") as image:
        image.save(root / "test" / "day" / "disk" / "copy.bmp")
    shown = polyfed("data", "check", root)
    assert shown.code == 2
    assert "1 image is in more than one of train, validation and test: day" in shown.out
    assert "train/day/disk/03.png; day test test/day/disk/copy.bmp" in shown.out


def test_damage_and_gaps_are_named(polyfed, images):
    cut = images / "day" / "disk" / "07.png"
    os.truncate(cut, cut.stat().st_size // 2)
    shutil.rmtree(images / "night" / "stripe")
    (images / "readme.txt").write_text("hello")
    shown = polyfed("data", "check", images)
    assert shown.code == 2
    for words in ("day/disk/07.png cannot be read", "night lacks stripe", "1 file skipped", "59 images"):
        assert words in shown.out, words


def test_a_table_can_be_checked(polyfed, images):
    table = images.parent / "scans.csv"
    lines = [f"{p.relative_to(images.parent)},{p.parent.parent.name},{p.parent.name}" for p in sorted(images.rglob("*.png"))]
    table.write_text("\n".join(["path,domain,label", *lines]))
    shown = polyfed("data", "check", table)
    assert shown.code == 0 and "80 images, 2 domains" in shown.out


def test_invalid_arguments(polyfed, images):
    says(polyfed("data", "check", "pacs"), "pacs is not a folder or table", "--root DIR")
    says(polyfed("data", "check", "pacs", "--root", images, "--sheet", "x.png"), "--sheet works only with a folder")
    says(polyfed("data", "check", images, "--sheet", "none/x.png"), "Cannot write the contact sheet")


def test_palette_images_are_compared_by_their_colours(polyfed, images):
    root, shade = images.parent / "split", iter(range(200))
    for split, colour in {"train": (255, 0, 0), "test": (0, 0, 255)}.items():
        for name in ("day/disk", "day/stripe", "night/disk", "night/stripe"):
            (root / split / name).mkdir(parents=True)
            for number in range(2):
                Image.new("L", (20, 20), next(shade)).save(root / split / name / f"{number}.png")
        indexed = Image.new("P", (20, 20))
        indexed.putpalette([*colour, *([0] * 765)])
        indexed.save(root / split / "day" / "disk" / "indexed.png")
    shown = polyfed("data", "check", root)
    assert shown.code == 0 and "indexed.png" not in shown.out
    indexed.convert("RGB").save(root / "train" / "day" / "disk" / "same.png")
    assert "indexed.png" in polyfed("data", "check", root).out


def test_packed_images_are_read_again_and_masks_are_not_packed(polyfed, images, tmp_path, monkeypatch):
    monkeypatch.chdir(images)
    assert polyfed("data", "pack", ".", "--size", "8", "--out", "p.tar").code == 0
    with tarfile.open("p.tar") as archive:
        names = archive.getnames()
    assert len(names) == 80 and all(name.startswith(f"{images.name}/") for name in names)
    assert not list(images.glob("*.part"))
    (tmp_path / "seg" / "masks").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "seg" / "masks" / "0.png")
    says(polyfed("data", "pack", tmp_path / "seg", "--size", "8", "--out", tmp_path / "m.tar"), "masks")
