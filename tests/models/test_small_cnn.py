"""small_cnn: sizes, shapes, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from helpers.networks import parameters
from polyfed.errors import ModelError
from polyfed.models import models
from polyfed.models.small_cnn import SmallCNN, small_cnn


def test_is_registered_and_built_from_text() -> None:
    model = models.build("small-cnn(width=16)", classes=7, input_shape=(3, 28, 28))
    assert isinstance(model, SmallCNN)
    assert isinstance(model.head, nn.Linear)
    assert model.head.out_features == 7


def test_parameter_count_by_hand() -> None:
    convolutions = 3 * 16 * 25 + 16 * 32 * 9 + 32 * 64 * 9
    norms = 2 * (16 + 32 + 64)
    head = 64 * 4 * 4 * 10 + 10
    count = parameters(small_cnn(10, (3, 28, 28)))
    assert count == convolutions + norms + head == 34_714
    assert count <= 150_000


def test_head_is_the_last_layer() -> None:
    model = small_cnn(10, (3, 28, 28))
    assert list(dict(model.named_children()))[-1] == "head"
    seen: list[torch.Tensor] = []
    model.get_submodule("head").register_forward_hook(lambda _m, _i, output: seen.append(output))
    logits = model(torch.zeros(2, 3, 28, 28))
    assert torch.equal(logits, seen[0])


def test_has_three_batch_norms() -> None:
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in small_cnn(10, (3, 28, 28)).modules()) == 3


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 17, 23), (3, 32, 32), (3, 64, 48)])
@pytest.mark.parametrize("examples", [1, 3])
def test_other_input_sizes(shape: tuple[int, int, int], examples: int) -> None:
    model = small_cnn(5, shape)
    assert model(torch.zeros(examples, *shape)).shape == (examples, 5)


def test_size_does_not_depend_on_the_input_size() -> None:
    assert parameters(small_cnn(10, (3, 16, 16))) == parameters(small_cnn(10, (3, 96, 96)))


def test_every_parameter_gets_a_gradient() -> None:
    torch.manual_seed(0)
    model = small_cnn(4, (3, 28, 28))
    loss = nn.functional.cross_entropy(model(torch.randn(8, 3, 28, 28)), torch.arange(8) % 4)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert bool(gradient.abs().sum() > 0), name


@pytest.mark.parametrize("shape", [(3, 15, 28), (3, 28, 8)])
def test_refuses_small_inputs(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ModelError, match="at least 16x16"):
        small_cnn(10, shape)


def test_refuses_no_width() -> None:
    with pytest.raises(ModelError, match="width must be at least 2, got 1"):
        small_cnn(10, (3, 28, 28), width=1)
