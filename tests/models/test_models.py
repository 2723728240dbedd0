"""Models: parameter counts of the papers, shapes, heads, and what pretrained weights need."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from helpers.networks import parameters
from polyfed.errors import ModelError, OptionError, UnknownName
from polyfed.models import models
from polyfed.models.paper_networks import AutoEncoder

Shape = tuple[int, int, int]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def built(text: str, classes: int = 10, shape: Shape = (3, 32, 32)) -> nn.Module:
    return models.build(text, classes=classes, input_shape=shape)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, BATCH_NORMS)]


@pytest.mark.parametrize(
    ("text", "classes", "shape", "expected", "norms", "affine"),
    [
        ("six_layer_cnn", 10, (3, 28, 28), 14_214_090, 3, 512),
        ('six_layer_cnn(variant="fedbn_original")', 10, (3, 28, 28), 14_219_210, 5, 512 + 2 * (2048 + 512)),
        ("alexnet_fedwon", 10, (3, 256, 256), 57_047_114, 5, 2_304),
        ("resnet20", 10, (3, 32, 32), 269_722, 19, 1_376),
        ("hfedf_cnn", 7, (3, 32, 32), 928_199, 0, 0),
        ("hfedf_cnn", 65, (3, 32, 32), 943_105, 0, 0),
        ("hfedf_cnn", 5, (3, 32, 32), 927_685, 0, 0),
        ('hfedf_cnn(norm="batch")', 7, (3, 32, 32), 928_199 + 704, 9, 2 * (32 + 32 + 64 + 2 * 112)),
        # (3*25+1)*6 + (6*25+1)*16 + 401*120 + 121*84 + 85*10, and batch norm on 6 + 16 channels.
        ('lenet(norm="none")', 10, (3, 32, 32), 62_006, 0, 0),
        ("lenet", 10, (3, 32, 32), 62_006 + 44, 2, 44),
    ],
)
def test_sizes_of_the_papers(text: str, classes: int, shape: Shape, expected: int, norms: int, affine: int) -> None:
    model = built(text, classes, shape)
    assert parameters(model) == expected
    assert len(batch_norms(model)) == norms
    assert sum(parameters(norm) for norm in batch_norms(model)) == affine


@pytest.mark.parametrize(
    ("name", "with_1000_classes", "features"),
    [
        ("resnet18", 11_689_512, 512),
        ("resnet50", 25_557_032, 2048),
        ("mobilenet_v2", 3_504_872, 1280),
        ("densenet121", 7_978_856, 1024),
    ],
)
def test_torchvision_sizes(name: str, with_1000_classes: int, features: int) -> None:
    """The counts torchvision publishes for 1,000 classes, less the rows of the head that are not needed."""
    assert parameters(built(name, classes=7)) == with_1000_classes - (1000 - 7) * (features + 1)


SMALLEST: list[tuple[str, Shape]] = [
    ("six_layer_cnn", (3, 28, 28)),
    ("six_layer_cnn", (1, 32, 20)),
    ('six_layer_cnn(variant="fedbn_original")', (3, 4, 4)),
    ("alexnet_fedwon", (3, 63, 70)),
    ('alexnet_fedwon(variant="fedbn_original")', (3, 63, 63)),
    ("lenet", (3, 32, 32)),
    ("lenet", (1, 16, 28)),
    ("resnet20", (3, 32, 32)),
    ("resnet20", (1, 5, 7)),
    ("hfedf_cnn", (3, 32, 32)),
    ('hfedf_cnn(norm="batch")', (3, 4, 9)),
    ("resnet18", (3, 64, 64)),
    ("mobilenet_v2", (3, 32, 32)),
    ("densenet121", (3, 32, 32)),
    ('timm(name="resnet18d")', (1, 64, 64)),
    ('timm(name="vit_tiny_patch16_224")', (3, 32, 48)),
]


@pytest.mark.parametrize(("text", "shape"), SMALLEST)
def test_ends_in_a_linear_layer_that_makes_the_logits(text: str, shape: Shape) -> None:
    model = built(text, classes=6, shape=shape).eval()
    linear: list[tuple[nn.Linear, torch.Tensor]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda layer, _, out: linear.append((layer, out)))
    with torch.no_grad():
        out = model(torch.rand(2, *shape))
    assert out.shape == (2, 6)
    last, made = linear[-1]
    assert last.out_features == 6
    assert torch.equal(out, made)
    if hasattr(model, "get_classifier"):
        assert model.get_classifier() is last  # type: ignore[operator]


@pytest.mark.parametrize(("text", "shape"), [("six_layer_cnn", (3, 28, 28)), ("resnet20", (3, 32, 32)), ("hfedf_cnn", (3, 32, 32))])
def test_built_from_the_callers_random_numbers(text: str, shape: Shape) -> None:
    states = []
    for seed in (1, 1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            states.append(built(text, shape=shape).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not all(torch.equal(states[0][key], states[2][key]) for key in states[0])


def test_resnet20_shortcuts_and_initialisation() -> None:
    model = built("resnet20")
    weights = model.get_parameter("body.stage3_block3.conv2.weight")
    # He initialisation: standard deviation sqrt(2 / (9 * 64)) = 0.0589.
    assert float(weights.std().detach()) == pytest.approx(0.0589, rel=0.03)
    block = model.get_submodule("body.stage2_block1").eval()
    block.get_submodule("conv2").weight.data.zero_()  # type: ignore[operator]
    x = torch.rand(2, 16, 8, 8)
    out = block(x).detach()
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()


def test_hfedf_cnn_layers_have_the_printed_shapes() -> None:
    model = built("hfedf_cnn", classes=7)
    x = torch.rand(1, 3, 32, 32)
    shapes = {}
    for name, layer in model.get_submodule("body").named_children():
        x = layer(x)
        shapes[name] = tuple(x.shape[1:])
    assert shapes["conv1"] == (32, 32, 32)
    assert shapes["conv2"] == (32, 16, 16)
    assert shapes["pool3"] == (64, 8, 8)
    assert shapes["inception1"] == (176, 8, 8)
    assert shapes["inception2"] == (288, 8, 8)
    assert shapes["dropout"] == (2592,)


def test_inception_passes_the_pooled_input_on() -> None:
    module = built("hfedf_cnn").get_submodule("body.inception1")
    x = torch.zeros(1, 64, 5, 5)
    x[0, 3, 2, 2] = 1.0
    passed = module(x)[0, 112:].detach()
    expected = torch.zeros(64, 5, 5)
    expected[3, 1:4, 1:4] = 1.0
    assert torch.equal(passed, expected)


def test_autoencoder() -> None:
    model = built("hfedf_autoencoder(latent=3)")
    assert isinstance(model, AutoEncoder)
    images = model(torch.rand(2, 3, 32, 32)).detach()
    assert images.shape == (2, 3, 32, 32)
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    assert model.encode(torch.rand(2, 3, 32, 32)).shape == (2, 3)
    # Convolutions 448 + 4,640, linear 2048*3+3 and 3*2048+2048, transposed 2,064 + 195.
    assert parameters(model) == 448 + 4_640 + 6_147 + 8_192 + 2_064 + 195
    assert models.find("hfedf_autoencoder").extra == {"classifies": False}


@pytest.mark.parametrize(
    ("text", "shape", "error", "said"),
    [
        ("alexnet_fedwon", (3, 32, 32), ModelError, "at least 63x63 pixels, got 32x32"),
        ("six_layer_cnn", (3, 3, 28), ModelError, "at least 4x4"),
        ("lenet", (3, 12, 12), ModelError, "at least 16x16"),
        ("resnet18", (2, 32, 32), ModelError, "1 or 3 channels, got 2"),
        ("hfedf_autoencoder", (3, 30, 32), ModelError, "multiples of 4"),
        ("hfedf_autoencoder(latent=0)", (3, 32, 32), OptionError, "at least 1"),
        ('lenet(norm="bach")', (3, 32, 32), OptionError, "one of batch, none"),
        ('six_layer_cnn(variant="fedbn")', (3, 28, 28), OptionError, "fedbn_original"),
        ('timm(name="resnt18d")', (3, 32, 32), UnknownName, "Did you mean resnet18d"),
    ],
)
def test_invalid_options_and_images_are_an_error(text: str, shape: Shape, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        built(text, shape=shape)


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's folder of weights, empty, on a machine without network."""

    def no_network(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "densenet121"])
def test_missing_weights_say_where_to_put_them(name: str, checkpoints: Path) -> None:
    with pytest.raises(ModelError, match="could not download") as caught:
        built(f"{name}(pretrained=True)")
    assert str(checkpoints) in str(caught.value)
    assert "pretrained=False" in str(caught.value)


def test_weights_in_place_are_used_without_network(checkpoints: Path) -> None:
    source = torchvision.models.resnet18()
    stored = {key: value for key, value in source.state_dict().items() if not key.endswith("num_batches_tracked")}
    torch.save(stored, checkpoints / "resnet18-f37072fd.pth")
    state = built("resnet18(pretrained=True)", classes=4).state_dict()
    assert all(torch.equal(state[key], value) for key, value in stored.items() if not key.startswith("fc."))
    assert state["fc.weight"].shape == (4, 512)


def test_published_densenet_names_are_understood(checkpoints: Path) -> None:
    def published(key: str) -> str:
        parts = key.split(".")
        if any(part.startswith("denselayer") for part in parts):
            parts[-2] = f"{parts[-2][:-1]}.{parts[-2][-1]}"
        return ".".join(parts)

    stored = torchvision.models.densenet121().state_dict()
    assert published("features.denseblock1.denselayer1.norm1.weight") == "features.denseblock1.denselayer1.norm.1.weight"
    torch.save({published(key): value for key, value in stored.items()}, checkpoints / "densenet121-a639ec97.pth")
    state = built("densenet121(pretrained=True)", classes=2).state_dict()
    assert all(torch.equal(state[key], value) for key, value in stored.items() if not key.startswith("classifier."))


def test_damaged_or_foreign_weights_are_named(checkpoints: Path) -> None:
    place = checkpoints / "resnet18-f37072fd.pth"
    place.write_bytes(b"not weights")
    with pytest.raises(ModelError, match=r"resnet18-f37072fd\.pth are damaged"):
        built("resnet18(pretrained=True)")
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7)}, place)
    with pytest.raises(ModelError, match="lack 99 entries"):
        built("resnet18(pretrained=True)")


def test_timm_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("timm.create_model", offline)
    monkeypatch.setattr("polyfed.models.from_timm._hub_problem", lambda hub: "")
    with pytest.raises(ModelError, match=r"weights of resnet18d \(no network\).*HF_HOME"):
        built('timm(name="resnet18d", pretrained=True)')
