"""``polyfed data check`` on images with masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.command_line import Command

PIXELS = np.random.default_rng(0)


def add_pair(folder: Path, name: str, values: tuple[int, ...] = (0, 1), mask_size: tuple[int, int] = (12, 16)) -> None:
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    Image.fromarray(PIXELS.integers(0, 256, (12, 16, 3), np.uint8)).save(folder / "images" / f"{name}.jpg")
    mask = np.resize(np.array(values, np.uint8), mask_size)
    Image.fromarray(mask).save(folder / "masks" / f"{name}.png")


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    for domain in ("north", "south"):
        for number in range(6):
            add_pair(tmp_path / "scans" / domain, str(number), (0, 1, 255) if number else (0, 2))
    (tmp_path / "scans" / "classes.txt").write_text("ground\nriver\ntree\n")
    return tmp_path / "scans"


def test_a_sound_folder(polyfed: Command, scans: Path, tmp_path: Path) -> None:
    found = polyfed("data", "check", scans, "--json", "--sheet", tmp_path / "s.png")
    assert found.code == 0 and found.json["ok"], found.out
    assert found.json["counts"]["north"] == {"all": [6], "train": [4], "test": [2]}
    assert found.json["by_class"] == {"north": [6, 5, 1], "south": [6, 5, 1]}
    with Image.open(tmp_path / "s.png") as picture:
        assert picture.height == 4 * 68, "a line of images and one of masks for each domain"
    shown = polyfed("data", "check", scans).out
    assert "12 images, 2 domains, 3 classes, no problems" in shown and "JPEG with masks L 12" in shown and "river" in shown


@pytest.mark.parametrize("gone", ["masks/2.png", "images/2.jpg"])
def test_a_missing_half_is_named(polyfed: Command, scans: Path, gone: str) -> None:
    (scans / "south" / gone).unlink()
    kind = gone.split("/")[0]
    found = polyfed("data", "check", scans)
    left = "south/images/2.jpg" if kind == "masks" else "south/masks/2.png"
    assert found.code == 2 and f"{left} has no counterpart in {kind}/" in " ".join(found.out.split())


def test_a_mask_of_another_size_is_named(polyfed: Command, scans: Path) -> None:
    add_pair(scans / "north", "3", mask_size=(16, 12))
    found = polyfed("data", "check", scans)
    assert found.code == 2
    assert "north/masks/3.png has 12x16 pixels, but its image north/images/3.jpg has 16x12" in " ".join(found.out.split())


def test_deep_images_that_differ_by_an_offset_are_not_the_same_picture(polyfed: Command, scans: Path) -> None:
    """Scaled alone, from the lowest value to the highest, both would have the same pixels."""
    values = PIXELS.random((12, 16), np.float32) * 1000 - 1500
    for domain, offset in (("north", 0), ("south", 300)):
        (scans / domain / "images" / "1.jpg").unlink()
        Image.fromarray(values + np.float32(offset)).save(scans / domain / "images" / "1.tif")
    found = polyfed("data", "check", scans, "--json").json
    assert found["ok"] and not found["notes"] and found["modes"]["TIFF with masks L"] == 2


def test_a_class_beyond_the_list_is_named(polyfed: Command, scans: Path) -> None:
    add_pair(scans / "north", "3", (0, 7))
    found = polyfed("data", "check", scans)
    said = " ".join(found.out.split())
    assert (
        found.code == 2
        and "The mask value 7 has no class in classes.txt, which lists the classes 0 to 2. 1 file: north/masks/3.png" in said
    )


def test_a_mask_without_any_class_is_named(polyfed: Command, scans: Path) -> None:
    add_pair(scans / "north", "3", (255,))
    found = polyfed("data", "check", scans)
    assert found.code == 2 and "north/masks/3.png has no pixel with a class: all have the ignored value 255" in " ".join(
        found.out.split()
    )


def test_damage_colour_masks_and_leaks_are_named(polyfed: Command, scans: Path) -> None:
    Image.new("RGB", (16, 12)).save(scans / "north" / "masks" / "1.png")
    whole = (scans / "south" / "images" / "1.jpg").read_bytes()
    (scans / "south" / "images" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    for number in range(6, 12):  # the same picture so often that train and test must share it
        add_pair(scans / "south", str(number))
        (scans / "south" / "images" / f"{number}.jpg").write_bytes((scans / "south" / "images" / "0.jpg").read_bytes())
    said = " ".join(polyfed("data", "check", scans).out.split())
    assert "north/masks/1.png is a mask with the colour mode RGB" in said and "south/images/1.jpg cannot be read" in said
    assert "in more than one of train, validation and test" in said


def test_masks_of_one_thing_are_no_void(polyfed: Command, tmp_path: Path) -> None:
    for number in range(6):
        add_pair(tmp_path / "one", str(number), (0, 255) if number else (255,))
    found = polyfed("data", "check", tmp_path / "one", "--json").json
    assert found["ok"] and found["by_class"] == {"one": [5, 6]}


def test_many_problems_are_not_all_listed(polyfed: Command, tmp_path: Path) -> None:
    for number in range(30):
        add_pair(tmp_path / "one", str(number), (255,) if number < 15 else (0, 1))
    problems = polyfed("data", "check", tmp_path / "one", "--json").json["problems"]
    assert len(problems) == 11 and problems[-1] == "And 5 more problems of this kind."
