"""Pretrained weights: read from a file or the hub without running code; their images; one channel instead of three."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from helpers.command_line import Command
from polyfed.core.data_types import Preparation
from polyfed.errors import ModelError, UnknownName
from polyfed.models import models
from polyfed.models.model_text import as_call, images_of_weights, with_absolute_weights, with_batch_norm
from polyfed.models.weights import weights_skipped
from polyfed.runs.assemble import build_data_set
from polyfed.settings import Settings
from polyfed.trust import names_function

SHAPE = (3, 32, 32)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NETWORKS = ["torchvision:mobilenet_v3_small", "timm:resnet10t"]


def built(text: str, classes: int = 4, shape: tuple[int, int, int] = SHAPE) -> nn.Module:
    if text.startswith("timm"):
        pytest.importorskip("timm", reason="needs the extra polyfed[models]")
    return models.build(as_call(text), classes=classes, input_shape=shape)


@pytest.fixture(scope="module", params=NETWORKS)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module, Path]:
    """A network, one that was trained on 1,000 classes, and a folder with its weights in both forms."""
    torch.manual_seed(1)
    source, folder = built(request.param, classes=1000), tmp_path_factory.mktemp("weights")
    save_file(source.state_dict(), folder / "w.safetensors")
    torch.save(source.state_dict(), folder / "w.pth")
    return request.param, source, folder


@pytest.mark.parametrize("form", ["w.safetensors", "w.pth"])
def test_a_local_file_gives_everything_but_the_head(files: tuple[str, nn.Module, Path], form: str) -> None:
    text, source, folder = files
    model = built(f'{text}(weights="{folder / form}")')
    theirs = source.state_dict()
    same = [
        key for key, value in model.state_dict().items() if value.shape == theirs[key].shape and torch.equal(value, theirs[key])
    ]
    others = {key.rpartition(".")[0] for key in set(theirs) - set(same)}
    assert len(others) == 1 and len(same) >= len(theirs) - 2, "only the head differs"
    assert model.normalisation == IMAGENET


@pytest.mark.parametrize("text", NETWORKS)
def test_a_thousand_classes_of_ones_own_get_a_new_head_too(text: str, tmp_path: Path) -> None:
    source = built(text, classes=1000)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    model = built(f'{text}(weights="{tmp_path / "w.safetensors"}")', classes=1000)
    differ = [key for key, value in source.state_dict().items() if not torch.equal(value, model.state_dict()[key])]
    assert differ and all("classifier" in key or "fc" in key for key in differ)


@pytest.mark.parametrize("text", NETWORKS)
def test_without_weights_a_network_says_nothing_of_images(text: str) -> None:
    assert not hasattr(built(text), "normalisation")
    assert images_of_weights(text) is None


class Opens:
    """A pickle that runs a command when it is read by ``pickle``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("text", ["resnet18", *NETWORKS])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(text: str, tmp_path: Path) -> None:
    (tmp_path / "w.pth").write_bytes(pickle.dumps({"fc.weight": Opens(tmp_path / "ran")}))
    with pytest.raises(ModelError, match=r"cannot read weights from .*w\.pth"):
        built(f'{text}(weights="{tmp_path / "w.pth"}")')
    torch.save({"fc.weight": Opens(tmp_path / "ran")}, tmp_path / "x.pth")
    with pytest.raises(ModelError, match=r"cannot read weights from .*x\.pth"):
        built(f'{text}(weights="{tmp_path / "x.pth"}")')
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", NETWORKS)
def test_files_that_are_no_weights_of_the_network_get_one_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"file .*gone\.pth not found"):
        built(f'{text}(weights="{tmp_path / "gone.pth"}")')
    (tmp_path / "w.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot read weights"):
        built(f'{text}(weights="{tmp_path / "w.safetensors"}")')
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ModelError, match="does not contain a state_dict"):
        built(f'{text}(weights="{tmp_path / "list.pth"}")')
    save_file({"strange": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"lack \d+ entries of the network"):
        built(f'{text}(weights="{tmp_path / "w.safetensors"}")')
    wrong = {key: value[:1].clone() if value.dim() == 4 else value for key, value in built(text).state_dict().items()}
    save_file(wrong, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"has shape|do not fit"):
        built(f'{text}(weights="{tmp_path / "w.safetensors"}")')


def test_the_hub_that_cannot_be_reached_gets_one_sentence_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="needs the extra polyfed[models]")
    constants = pytest.importorskip("huggingface_hub", reason="timm brings it").constants
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot reach hub\.invalid.*HF_HOME.*weights=\"FILE\".*pretrained=False"):
        built("timm:resnet10t(pretrained=True)")
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("text", ["torchvision:resnet18", "torchvision:googlenet", "torchvision:squeezenet1_0"])
def test_grey_images_are_seen_as_if_all_channels_were_the_same(text: str) -> None:
    """The rule for one channel: the first convolution is summed over its three."""
    side = 64
    torch.manual_seed(0)
    colour = built(text, shape=(3, side, side)).eval()
    torch.manual_seed(0)
    grey = built(text, shape=(1, side, side)).eval()
    x = torch.randn(2, 1, side, side)
    with torch.no_grad():
        if hasattr(colour, "transform_input"):
            colour.transform_input = False  # type: ignore[assignment]
        torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("text", "side"), [("torchvision:googlenet", 64), ("torchvision:inception_v3", 80)])
def test_a_grey_photograph_gives_what_it_gives_in_colour(text: str, side: int) -> None:
    """Also for a network that transforms only RGB inputs."""
    photograph = torch.randint(0, 256, (2, 1, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    seen: list[torch.Tensor] = []
    for channels in (1, 3):
        torch.manual_seed(0)
        with weights_skipped():
            model = built(f"{text}(pretrained=True)", shape=(channels, side, side)).eval()
        mean, std = model.normalisation  # type: ignore[misc]
        first = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
        first.register_forward_hook(lambda layer, inputs, output: seen.append(output))
        with torch.no_grad():
            model(Preparation(mean, std).for_testing(photograph.expand(-1, channels, -1, -1)))
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-5)


def test_timm_sums_the_first_layer_of_weights_too(tmp_path: Path) -> None:
    source = built("timm:resnet10t")
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    grey = built(f'timm:resnet10t(weights="{tmp_path / "w.safetensors"}")', shape=(1, 32, 32))
    first = next(key for key, value in source.state_dict().items() if value.dim() == 4)
    torch.testing.assert_close(grey.state_dict()[first], source.state_dict()[first].sum(1, keepdim=True))
    assert grey.normalisation == ((pytest.approx(0.449),), (pytest.approx(0.226),))


def test_unknown_names_name_the_nearest() -> None:
    pytest.importorskip("timm", reason="needs the extra polyfed[models]")
    with pytest.raises(UnknownName, match="Did you mean resnet18"):
        built("torchvision:resnt18")
    with pytest.raises(UnknownName, match="no classification network called 'fcn_resnet50'"):
        built("torchvision:fcn_resnet50")
    with pytest.raises(UnknownName, match="IMAGENET1K_V1, IMAGENET1K_V2"):
        built("torchvision:resnet50.V9")
    with pytest.raises(UnknownName, match="Choose from: resnet18d"):
        built("timm:resnet18d.nonsense(pretrained=True)")


def test_texts_of_libraries() -> None:
    assert as_call("torchvision:swin_t") == as_call("torchvision:swin_t()") == 'torchvision(name="swin_t")'
    assert as_call('timm:x.y(weights="a(1).pth", pretrained=True)') == 'timm(name="x.y", weights="a(1).pth", pretrained=True)'
    assert as_call("my_models:net") == "my_models:net" and names_function("my_models:net")
    assert not names_function("torchvision:swin_t") and not names_function('timm:a(weights="x:y")')
    assert with_batch_norm("hfedf_cnn") == 'hfedf_cnn(norm="batch")'
    assert with_batch_norm("small_cnn(width=8)") == "small_cnn(width=8)" and with_batch_norm("my:net") == "my:net"


def test_the_file_of_weights_is_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_absolute_weights('resnet18(weights="w.pth")') == f'resnet18(weights="{tmp_path}/w.pth")'
    assert with_absolute_weights('torchvision:swin_t(weights="w.pth")') == f'torchvision(name="swin_t", weights="{tmp_path}/w.pth")'
    assert with_absolute_weights("torchvision:swin_t") == "torchvision:swin_t"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for domain in ("a", "b"):
        for shade, label in ((40, "dark"), (200, "light")):
            (root / domain / label).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (40, 40), (shade + number, shade, shade)).save(root / domain / label / f"{number}.png")
    return root


def side(data: str, model: str | None) -> int:
    return build_data_set(data, Settings(data=data, model=model)).domains[0].train.batch(slice(0, 1))[0].shape[-1]


def test_images_are_read_at_the_pretraining_size(folder: Path) -> None:
    assert side(str(folder), None) == side(str(folder), "resnet18") == 64
    assert side(str(folder), "resnet18(pretrained=True)") == side(str(folder), 'resnet18(weights="x")') == 224
    assert side(f'image_folder(root="{folder}")', "torchvision:inception_v3(pretrained=True)") == 299
    assert side(f'image_folder(root="{folder}", size=48)', "resnet18(pretrained=True)") == 48
    notes = build_data_set(str(folder), Settings(data=str(folder), model="resnet18(True)")).notes
    assert any("read at 224x224 pixels, the size for the weights of resnet18(True)" in note for note in notes)


def test_a_run_from_a_file_of_weights_is_opened_and_scored_without_the_file(polyfed: Command, tmp_path: Path, folder: Path) -> None:
    torch.manual_seed(3)
    save_file(built("torchvision:mobilenet_v3_small").state_dict(), tmp_path / "w.safetensors")
    words = ["run", f'image_folder(root="{folder}", size=32)', "--model", 'torchvision:mobilenet_v3_small(weights="w.safetensors")']
    words += ["--method", "fedbn", "--rounds", "1", "--local-steps", "1", "--batch-size", "4", "--out", "r", "-q", "--json"]
    accuracy = polyfed(*words).json["accuracy"]
    document = (tmp_path / "r" / "run.toml").read_text()
    assert "mean = [\n    0.485" in document and str(tmp_path / "w.safetensors") in document
    (tmp_path / "w.safetensors").unlink()
    assert polyfed("evaluate", "r", "--json").json["accuracy"] == accuracy


def test_show_describes_networks_of_libraries_and_fetches_nothing(polyfed: Command) -> None:
    assert "name" in polyfed("show", "torchvision").out
    found = polyfed("show", "torchvision:shufflenet_v2_x0_5(pretrained=True)", "--json").json
    assert found["parameters"] == 341_792 + 1025 * 10 and found["head"] == "fc"


def test_networks_without_reading_weights_are_the_same() -> None:
    with weights_skipped():
        model = built("resnet18(pretrained=True)")
    assert model.normalisation == IMAGENET
