"""Images with more than 8 bits: the run's scaling rule holds in training, evaluation, prediction, export and at nodes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import polyfed as package
from helpers.command_line import Command, says
from helpers.paths import EXAMPLES
from polyfed.data.own.own_data import own_data
from polyfed.errors import DataError, OptionError, SettingError
from polyfed.runs.predict import ImageInputs
from polyfed.runs.reopen import open_experiment, use_other_tests

LEVELS = {"dark": 10_000, "light": 40_000}
"""Both are 61 % of the smallest bit depth that holds them, so the classes differ only if one range is used for all images."""
QUICK = {"rounds": 6, "local_steps": 8, "batch_size": 8, "lr": 0.05, "model": "small_cnn(width=4)"}


def exposed(root: Path, white_of: dict[str, int], images: int = 10, levels: dict[str, int] = LEVELS) -> Path:
    """Images whose class is their exposure, as a fraction of the white of their domain."""
    random = np.random.default_rng(0)
    for domain, white in white_of.items():
        for label, level in levels.items():
            (root / domain / label).mkdir(parents=True)
            for number in range(images):
                values = (level + random.integers(-500, 500, (24, 20))) * (white / 65535)
                Image.fromarray(values.astype(np.uint16)).save(root / domain / label / f"{number}.png")
    return root


def right(run: package.Result, root: Path, **how: str) -> float:
    """Return the fraction of files that a run classifies correctly."""
    files = sorted(root.rglob("*.png"))
    return float(np.mean([found.label == file.parent.name for found, file in zip(run.predict(files, **how), files, strict=True)]))


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two domains of one range."""
    folder = tmp_path_factory.mktemp("same")
    package.run(str(exposed(folder / "images", {"north": 65535, "south": 65535})), "fedavg", out=folder / "run", **QUICK)
    return folder


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two domains of 16 and 12 bits."""
    folder = tmp_path_factory.mktemp("differing")
    package.run(str(exposed(folder / "images", {"north": 65535, "south": 4095})), "fedbn", out=folder / "run", **QUICK)
    return folder


def test_prediction_scales_images_as_training_does(polyfed: Command, same: Path) -> None:
    run = package.open_run(same / "run")
    assert run.accuracy["seen"] == {"north": 1.0, "south": 1.0}
    assert right(run, same / "images") == 1.0
    assert run.predict([Image.open(same / "images/north/dark/0.png")])[0].label == "dark"
    rows = polyfed("predict", same / "run", same / "images", "-q", "--json").json["predictions"]
    assert [row["class"] for row in rows] == [Path(row["image"]).parent.name for row in rows]
    document = tomllib.loads((same / "run" / "run.toml").read_text())
    assert document["outline"]["deep_ranges"] == {name: {"integers": [0, 65535]} for name in ("north", "south")}


def test_inputs_of_prediction_are_those_of_training(same: Path) -> None:
    data = own_data(str(same / "images"))
    files = sorted((same / "images").rglob("*.png"))
    inputs = ImageInputs.of(open_experiment(same / "run").federation)
    read = {inputs.one(file).numpy().tobytes() for file in files}
    parts = [part for domain in data.domains for part in (domain.train, domain.validation, domain.test) if part is not None]
    assert read == {image.numpy().tobytes() for part in parts for image in part.batch(slice(None))[0]}


def test_domains_of_different_ranges_must_be_named(polyfed: Command, differing: Path) -> None:
    folder, files = differing / "run", differing / "images"
    words = ("more than 8 bits", "north 0..65535, south 0..4095", "--domain")
    says(polyfed("predict", folder, files / "north"), *words)
    with pytest.raises(SettingError, match="--domain"):
        package.predict(folder, str(files / "north"))
    for domain in ("north", "south"):
        told = polyfed("predict", folder, files / domain, "--client", domain, "--domain", domain, "-q", "--json")
        assert all(row["class"] == Path(row["image"]).parent.name for row in told.json["predictions"])
        assert right(package.open_run(folder), files / domain, client=domain) == 1.0, "a client with one domain names it"
    says(polyfed("predict", folder, files / "north", "--domain", "nort"), "Unknown domain 'nort'. Did you mean north")
    Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save("plain.png")
    assert polyfed("predict", folder, "plain.png").code == 0, "images of 8 bits need no domain"


def test_evaluation_of_few_other_images_uses_the_range_of_the_run(polyfed: Command, same: Path, tmp_path: Path) -> None:
    dark = exposed(tmp_path / "few" / "train", {"north": 65535, "west": 65535}, levels={"dark": 10_000, "light": 11_000})
    (tmp_path / "few" / "train").rename(tmp_path / "dark")
    experiment = open_experiment(same / "run")
    use_other_tests(experiment, str(tmp_path / "dark"), None, "all", pytest.fail)
    for examples in (experiment.federation.unseen["west"],):
        assert examples.batch(slice(None))[0].float().mean() == pytest.approx(10_500 / 257, abs=1), dark
    found = polyfed("evaluate", same / "run", tmp_path / "dark", "-q", "--json").json
    assert found["accuracy"]["seen"] == {"north": 0.5} and found["accuracy"]["unseen"] == {"west": 0.5}


def test_a_new_domain_without_a_common_range_is_scaled_by_its_own(polyfed: Command, differing: Path, tmp_path: Path) -> None:
    exposed(tmp_path / "other", {"west": 1023, "north": 16383})
    told = polyfed("evaluate", differing / "run", "other")
    assert "domain west has images with more than 8 bits and is new to the run" in told.err and "0..1023" in told.err
    assert "domain north" not in told.err
    fixed = polyfed("evaluate", differing / "run", 'image_folder(root="other", deep_range="0..1023")')
    assert fixed.code == 0 and "own range" not in fixed.err


def test_added_images_do_not_change_the_range_of_a_run(polyfed: Command, tmp_path: Path) -> None:
    exposed(tmp_path / "images", {"north": 4095, "south": 4095}, images=5)
    assert polyfed("run", "./images", "--rounds", "1", "--batch-size", "4", "--out", "r", "-q").code == 0
    for label in LEVELS:
        Image.fromarray(np.full((20, 20), 65535, np.uint16)).save(tmp_path / "images" / "north" / label / "new.png")
    experiment = open_experiment(tmp_path / "r", own_data=True)
    assert experiment.federation.preparation.deep_ranges["north"] == {"integers": (0, 4095)}
    dark = [x.float().mean() for x, y in [experiment.federation.clients[0].train.batch(slice(None))] for x in x[y == 0]]
    assert min(dark) == pytest.approx(10_000 / 257, abs=2)


def test_a_fixed_range_is_an_option_of_the_data(tmp_path: Path) -> None:
    root = str(exposed(tmp_path / "images", {"north": 4095, "south": 1000}, images=5))
    fixed = own_data(root, deep_range="0..4095").preparation.deep_ranges
    assert fixed == {name: {"integers": (0, 4095)} for name in ("north", "south")}
    assert own_data(root).preparation.deep_ranges["south"] == {"integers": (0, 1023)}
    for wrong in ("4095", "9..1", "0..nan", "{}x", '{"a": {"bits": [0, 1]}}'):
        with pytest.raises(OptionError, match="deep_range"):
            own_data(root, deep_range=wrong)


def test_images_beyond_the_range_and_runs_without_one_are_warned_of(
    same: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exposed(tmp_path / "images", {"north": 4095, "south": 4095}, images=5)
    run = package.run(str(tmp_path / "images"), "fedavg", rounds=1, batch_size=4)
    with caplog.at_level(logging.WARNING):
        run.predict([same / "images/north/light/0.png"])
    assert "The run scales 0..4095, so values outside are clipped" in caplog.text
    caplog.clear()
    random = np.random.default_rng(0)
    plain = {"a": ((torch.from_numpy(random.integers(0, 256, (20, 3, 16, 16), np.uint8)), torch.arange(20) % 2),) * 2}
    with caplog.at_level(logging.WARNING):
        package.run(plain, "fedavg", rounds=1, batch_size=4).predict([same / "images/north/light/0.png"])
    assert "the run records no range for such images" in caplog.text


def test_onnx_files_carry_the_range(polyfed: Command, same: Path, differing: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the export extra: pip install 'polyfed[export]'")
    pytest.importorskip("onnxscript", reason="needs the export extra: pip install 'polyfed[export]'")

    def classified(*words: str | Path) -> subprocess.CompletedProcess[str]:
        script = [sys.executable, str(EXAMPLES / "classify_with_onnx.py"), *map(str, words)]
        return subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=False)

    assert polyfed("export", same / "run", "--to", "onnx", "-o", "same.onnx").code == 0
    files = [same / "images/north/dark/0.png", same / "images/south/light/1.png"]
    assert classified("same.onnx", *files).stdout == f"{files[0]}: dark\n{files[1]}: light\n"
    about = polyfed("export", differing / "run", "--to", "onnx", "--newcomer", "-o", "both.onnx", "--json").json["metadata"]
    ranges = {"north": {"integers": [0, 65535]}, "south": {"integers": [0, 4095]}}
    assert json.loads(about["deep_ranges"]) == ranges
    refused = classified("both.onnx", differing / "images/south/light/0.png")
    assert refused.returncode != 0 and "--domain" in refused.stderr
    about = polyfed("export", differing / "run", "--to", "onnx", "--client", "south", "-o", "south.onnx", "--json").json["metadata"]
    assert json.loads(about["deep_ranges"]) == {"south": ranges["south"]}
    file = differing / "images/south/light/0.png"
    assert classified("south.onnx", file).stdout == f"{file}: light\n"


def test_images_with_masks_have_a_range_too(tmp_path: Path) -> None:
    for kind in ("images", "masks"):
        (tmp_path / "scans" / kind).mkdir(parents=True)
    for number in range(10):
        mask = np.tile(np.uint8([0, 1]), (16, 8))
        Image.fromarray(mask).save(tmp_path / "scans" / "masks" / f"{number}.png")
        Image.fromarray(np.full((16, 16), 300 + number, np.uint16)).save(tmp_path / "scans" / "images" / f"{number}.png")
    data = own_data(str(tmp_path / "scans"), height=16, width=16)
    assert data.preparation.deep_ranges == {"scans": {"integers": (0, 1023)}}


def test_packing_refuses_what_jpeg_cannot_hold(polyfed: Command, same: Path) -> None:
    says(polyfed("data", "pack", same / "images", "--size", "16", "--out", "small.tar"), "more than 8 bits")
    assert not Path("small.tar").exists()


def test_damaged_ranges_of_a_run_are_named(same: Path) -> None:
    from polyfed.data.store.deep_ranges import read_ranges

    for wrong in ([], {"a": []}, {"a": {"integers": [1]}}, {"a": {"integers": [2, 1]}}, {"a": {"floats": [0, "x"]}}):
        with pytest.raises(ValueError, match="range"):
            read_ranges(wrong)
    with pytest.raises(DataError, match="Unknown domain"):
        package.open_run(same / "run").predict([same / "images/north/dark/0.png"], domain="east")
