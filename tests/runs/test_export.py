"""Exported files: predictions, metadata and errors."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import nn

import polyfed as pf
from helpers.command_line import Command, says
from helpers.paths import EXAMPLES
from helpers.tiny_runs import trained
from polyfed.errors import MissingExtra, ModelError, RunFolderError, SettingError
from polyfed.models.layers.folding import fold_for_prediction
from polyfed.models.layers.norms import JSBatchNorm
from polyfed.runs import export
from polyfed.runs.experiment import Experiment
from polyfed.runs.export import export_model

DATA = "digits-mini(per_domain=20)"
NEEDS = "needs the export extra: pip install 'polyfed[export]'"


@pytest.fixture(scope="module")
def fedavg() -> Experiment:
    return trained("fedavg")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    pf.run(DATA, "fedbn", model="small_cnn(width=4)", rounds=1, batch_size=8, out=folder)
    return folder


def random_images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("method", "norms", "convolutions"),
    [("fedavg", 2, 0), ("fedstein", 2, 0), ("fedwon", 0, 2), ("fedavg + group_norm", 0, 0)],
)
def test_folding_computes_the_same_with_plain_convolutions_only(method: str, norms: int, convolutions: int) -> None:
    model = trained(method).bench.model.eval()
    before = copy.deepcopy(model.state_dict())
    folded = fold_for_prediction(model)
    assert (folded.norms, folded.standardised, folded.left) == (norms, convolutions, ())
    x = random_images()
    with torch.no_grad():
        torch.testing.assert_close(folded.model(x), model(x), rtol=1e-4, atol=1e-5)
    kinds = {type(module) for module in folded.model.modules()}
    assert not kinds & {nn.BatchNorm2d, JSBatchNorm} and not any(kind.__name__.startswith("WS") for kind in kinds)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items()), "the model itself was changed"


def test_a_norm_that_does_not_follow_a_convolution_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, 2)).eval()
    folded = fold_for_prediction(model)
    assert (folded.norms, folded.left) == (0, ("2",))
    x = random_images()
    assert torch.equal(folded.model(x), model(x))


@pytest.mark.parametrize("form", ["pt2", "safetensors"])
@pytest.mark.parametrize("fold", [False, True])
def test_files_answer_as_the_model_does(fedavg: Experiment, tmp_path: Path, form: str, fold: bool) -> None:
    found = export_model(fedavg, form, tmp_path / f"model.{form}", fold=fold)
    assert found.whose == "shared" and found.difference < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == [f"model.{form}"]
    assert [row.what for row in found.forms] == ["as trained, in PyTorch", *["folded, in PyTorch"] * fold, found.forms[-1].what]
    assert all(row.size > 0 and row.seconds > 0 for row in found.forms)
    if form == "pt2":
        extra = {"polyfed.json": ""}
        program = torch.export.load(found.path, extra_files=extra).module()
        assert json.loads(extra["polyfed.json"]) == dict(found.metadata)
        shape = json.loads(found.metadata["input_shape"])
        assert program(torch.zeros(1, *shape)).shape == (1, 3) and program(torch.zeros(4, *shape)).shape == (4, 3)
    else:
        with safe_open(found.path, "pt") as file:
            assert file.metadata() == dict(found.metadata)
            assert any("running_mean" in name for name in file.keys()) is not fold  # noqa: SIM118


def test_the_onnx_example_says_what_the_run_says(polyfed: Command, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason=NEEDS)
    pytest.importorskip("onnxscript", reason=NEEDS)
    told = polyfed("export", run, "--to", "onnx", "--fold", "--client", "pen", "-o", "pen.onnx", "--json")
    assert told.code == 0, told.err
    about = told.json
    assert about["whose"] == "client pen" and about["folded"] == {"norms": 3, "convolutions": 0, "left": []}
    assert about["metadata"]["classes"] == json.dumps([str(digit) for digit in range(10)])
    assert json.loads(about["metadata"]["normalised"]) == {"scale": 255.0, "mean": [0.5] * 3, "std": [0.5] * 3}
    for words in ("as trained, in PyTorch", "folded, in PyTorch", "exported, in onnxruntime", "ms per image", "file: pen.onnx"):
        assert words in told.out
    files = []
    for seed in range(4):
        pixels = torch.randint(0, 256, (32, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        files.append(f"{seed}.png")
        Image.fromarray(pixels.numpy()).save(files[-1])
    expected = polyfed("predict", run, *files, "--client", "pen", "-q", "--json").json["predictions"]
    script = [sys.executable, str(EXAMPLES / "classify_with_onnx.py"), "pen.onnx", *files]
    said = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert said == "".join(f"{row['image']}: {row['class']}\n" for row in expected)


def test_where_clients_differ_somebody_must_be_named(polyfed: Command, run: Path) -> None:
    clients = "pen, photo, print, street, post"
    says(
        polyfed("export", run, "--to", "pt2"),
        "fedbn trains one model per client. Choose one with --client, or export the newcomer model with --newcomer. "
        f"Clients: {clients}.",
    )
    says(polyfed("export", run, "--to", "pt2", "--client", "pn"), f"Unknown client 'pn'. Clients: {clients}.")
    says(polyfed("export", run, "--to", "pt2", "--client", "pen", "--newcomer"), "select different models. Remove one of them.")
    says(polyfed("export", run, "--to", "onx"), "--to cannot be 'onx'. Did you mean onnx?")
    says(polyfed("export", run, "--to", "pt2", "--newcomer", "-o", "no/where.pt2"), "Folder not found: no.")
    ended = polyfed("export", run, "--to", "safetensors", "--newcomer")
    assert ended.code == 0 and Path("run-newcomer.safetensors").is_file()


def test_what_predicts_in_its_own_way_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^fedsr.* does not predict with the logits of one forward pass"):
        export_model(trained("fedsr"), "safetensors", tmp_path / "model.safetensors")


def test_a_file_that_answers_differently_is_not_kept(fedavg: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, images: Any, path: Path, described: Any) -> Any:
        path.write_text("something")
        return lambda x: model(x) + 1

    monkeypatch.setattr(export, "WRITERS", {"pt2": wrong})
    with pytest.raises(ModelError, match=r"The logits of the file differ from those of the model .* No file was written"):
        export_model(fedavg, "pt2", tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_traced_says_what_would_work(fedavg: Experiment, tmp_path: Path) -> None:
    class Moody(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :3] * (1 if x.sum().item() > 0 else 2)

    with pytest.raises(ModelError, match=r"Moody cannot be exported to pt2 .* Use --to safetensors"):
        export.write_pt2(Moody(), random_images(), tmp_path / "x.pt2", {})


def test_refusals(fedavg: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFolderError, match=r"is a folder\. Specify a file with -o"):
        export_model(fedavg, "pt2", tmp_path)
    with pytest.raises(SettingError, match="--to cannot be"):
        export_model(fedavg, "tflite", tmp_path / "x")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'polyfed\[export\]'"):
        export_model(fedavg, "onnx", tmp_path / "x.onnx")
