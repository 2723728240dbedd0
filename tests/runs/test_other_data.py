"""``polyfed evaluate RUN DATA`` reads other data in the same way as the data of the run, and as ``predict`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import polyfed as package
from helpers.command_line import Command, says
from polyfed.errors import DataError
from polyfed.runs.experiment import Experiment
from polyfed.runs.predict import ImageInputs
from polyfed.runs.reopen import use_other_tests

FEW = {"rounds": 1, "local_steps": 1, "batch_size": 4}


def pictures(root: Path, domains: Sequence[str], classes: Sequence[str], size: tuple[int, int] = (20, 50)) -> Path:
    """Write folders of ten random images per class, by default far from square."""
    random = np.random.default_rng(0)
    for domain in domains:
        for label in classes:
            (root / domain / label).mkdir(parents=True)
            for number in range(10):
                Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(root / domain / label / f"{number}.png")
    return root


def masked(root: Path, classes: int, size: tuple[int, int]) -> Path:
    """Write a domain of ten images with masks; the red channel is the class of each pixel."""
    random = np.random.default_rng(1)
    for kind in ("images", "masks"):
        (root / "place" / kind).mkdir(parents=True)
    for number in range(10):
        mask = random.integers(0, classes, size, np.uint8)
        Image.fromarray(np.stack([mask * 100, mask, mask], axis=2)).save(root / "place" / "images" / f"{number}.png")
        Image.fromarray(mask).save(root / "place" / "masks" / f"{number}.png")
    return root


def trained(data: object, **settings: object) -> Experiment:
    return package.run(data, **FEW, **settings).experiment  # type: ignore[arg-type]


def unseen_images(experiment: Experiment) -> dict[str, torch.Tensor]:
    """Return the test images of the unseen domains."""
    return {name: examples.batch(slice(None))[0] for name, examples in experiment.federation.unseen.items()}


@pytest.mark.parametrize("written", ["{}", 'image_folder(root="{}")', "table"])
@pytest.mark.parametrize("middle_square", [False, True])
def test_evaluate_sees_the_pixels_that_predict_sees(tmp_path: Path, written: str, middle_square: bool) -> None:
    own = pictures(tmp_path / "own", ["a", "b"], ["x", "y"])
    run = trained(f'image_folder(root="{own}", size=16, middle_square={middle_square})')
    other = pictures(tmp_path / "other", ["c"], ["x", "y"], (30, 70))
    files = sorted(other.rglob("*.png"))
    text = written.format(other)
    if written == "table":
        text = str(other / "table.csv")
        lines = [f"{file.relative_to(other)},c,{file.parent.name}" for file in files]
        Path(text).write_text("\n".join(["path,domain,label", *lines]))
    use_other_tests(run, text, None, "all", pytest.fail)
    inputs = ImageInputs.of(run.federation)
    assert inputs == ImageInputs(3, 16, 16, middle_square)
    read = {bytes(inputs.one(file).numpy().tobytes()) for file in files}
    assert {image.numpy().tobytes() for image in unseen_images(run)["c"]} == read
    assert inputs.one(files[0]).tolist() != ImageInputs(3, 16, 16, not middle_square).one(files[0]).tolist()


def test_a_run_on_grey_images_is_scored_on_colour_ones_as_it_predicts_them(tmp_path: Path) -> None:
    x, y = torch.randint(0, 256, (12, 1, 16, 16), dtype=torch.uint8), torch.arange(12) % 2
    run = trained({"a": ((x, y), (x, y))}, model="small_cnn")
    other = pictures(tmp_path / "other", ["c"], ["0", "1"], (16, 16))
    use_other_tests(run, str(other), None, "all", pytest.fail)
    read = {ImageInputs.of(run.federation).one(file).numpy().tobytes() for file in other.rglob("*.png")}
    assert {image.numpy().tobytes() for image in unseen_images(run)["c"]} == read


def test_classes_are_matched_by_name_and_some_may_be_missing(tmp_path: Path) -> None:
    run = trained(str(pictures(tmp_path / "own", ["a", "b"], ["cat", "dog", "eel", "fox"])))
    other = pictures(tmp_path / "other", ["c"], ["fox", "dog"])
    use_other_tests(run, str(other), None, "all", pytest.fail)
    assert run.federation.unseen["c"].labels.bincount(minlength=4).tolist() == [0, 10, 0, 10]
    with pytest.raises(DataError, match=r"has 2 classes, but the run has 4: cat, dog, eel, fox\..*subset of these class names"):
        use_other_tests(run, str(pictures(tmp_path / "third", ["c"], ["fox", "gnu"])), None, "all", pytest.fail)


def test_what_is_worth_knowing_of_other_data_is_said(polyfed: Command, tmp_path: Path) -> None:
    own = pictures(tmp_path / "own", ["a", "b"], ["x", "y"])
    assert polyfed("run", own, "--rounds", "1", "--out", "r", "-q").code == 0
    other = pictures(tmp_path / "other", ["c"], ["x", "y"])
    (other / "c" / "x" / "notes.txt").touch()
    assert "1 file skipped" in polyfed("evaluate", "r", other).err.replace("\n", " ")


def test_masks_are_resized_with_their_images(polyfed: Command, tmp_path: Path) -> None:
    own = masked(tmp_path / "own", 3, (32, 48))
    data = f'mask_folder(root="{own}", height=32, width=48)'
    assert polyfed("run", data, "--rounds", "1", "--local-steps", "1", "--batch-size", "4", "--out", "r", "-q").code == 0
    found = polyfed("evaluate", "r", own, "--json", "-q").json
    assert found["accuracy"] == polyfed("evaluate", "r", "--json", "-q").json["accuracy"]
    run = package.open_run("r", notify=pytest.fail).experiment
    other = masked(tmp_path / "other", 3, (64, 64))
    (other / "place").rename(other / "elsewhere")
    use_other_tests(run, f'mask_folder(root="{other}", height=64, width=64)', None, "all", pytest.fail)
    x, y = run.federation.unseen["elsewhere"].batch(slice(None))
    assert x.shape == (10, 3, 32, 48) and y.shape == (10, 32, 48) and set(y.unique().tolist()) == {0, 1, 2}
    says(polyfed("evaluate", "r", pictures(tmp_path / "third", ["c"], ["x", "y"]), "-q"), "is for classification", "segmentation")
