"""MixStyle: styles against numpy, its places, and how often it acts."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from polyfed.errors import ModelError
from polyfed.methods import mixstyle
from polyfed.testing import TinyNet


def test_mixstyle_against_numpy_and_its_styles() -> None:
    stream = torch.Generator().manual_seed(4)
    x = torch.randn(5, 3, 4, 4, generator=stream) * 2 + 1
    share, partner = torch.rand(5, generator=stream), torch.randperm(5, generator=stream)
    a, lam = x.double().numpy(), share.double().numpy()[:, None, None, None]
    mean, spread = a.mean((2, 3), keepdims=True), np.sqrt(a.var((2, 3), ddof=1, keepdims=True) + 1e-6)
    order = partner.numpy()
    expected = (a - mean) / spread * (lam * spread + (1 - lam) * spread[order]) + lam * mean + (1 - lam) * mean[order]
    np.testing.assert_allclose(mixstyle.mixed(x, share, partner).numpy(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixstyle.mixed(x, torch.ones(5), partner), x, rtol=1e-5, atol=1e-5)
    borrowed = mixstyle.mixed(x, torch.zeros(5), partner)
    torch.testing.assert_close(borrowed.mean((2, 3)), x[partner].mean((2, 3)), rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="have one position"):
        mixstyle.mixed(torch.zeros(4, 3, 1, 1), torch.ones(4), torch.arange(4))


def test_mixstyle_without_gradient_through_styles() -> None:
    x = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([1, 2, 3, 0])
    mixstyle.mixed(x, torch.zeros(4, dtype=torch.float64), order).sum().backward()  # type: ignore[no-untyped-call]
    spread = (x.detach().var((2, 3), keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(x.grad, (spread[order] / spread).expand_as(x))


def test_mixstyle_places_names_and_modes() -> None:
    resnet = torchvision.models.resnet18(num_classes=3)
    assert mixstyle.places(resnet, "auto") == ["layer1", "layer2", "layer3"]
    assert mixstyle.places(resnet, ("layer1", "layer2")) == ["layer1", "layer2"]
    assert mixstyle.places(resnet, "layer?.0") == ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]
    assert mixstyle.places(TinyNet(), "auto") == ["stem.2"]
    with pytest.raises(ModelError, match="Did you mean layer1"):
        mixstyle.places(resnet, "layr1")
    with pytest.raises(ModelError, match="no convolution"):
        mixstyle.places(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), "auto")
    names = list(TinyNet().state_dict())
    model = copy.deepcopy(mixstyle.InsertMixStyle("auto", 1.0, 0.1)(TinyNet()))
    assert list(model.state_dict()) == names
    x = torch.randn(6, 3, 8, 8)
    model.eval()
    before = torch.get_rng_state()
    assert torch.equal(model(x), model(x)) and torch.equal(before, torch.get_rng_state())
    model.train()
    assert not torch.equal(model(x), model(x))


def test_mixstyle_is_applied_as_often_as_it_says() -> None:
    torch.manual_seed(0)
    model = nn.Module().train()
    hook = mixstyle.MixAfter(model, 0.3, 0.1)
    times = sum(hook(model, (), torch.randn(2, 1, 2, 2)) is not None for _ in range(1000))
    assert 250 < times < 350
