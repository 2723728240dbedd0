"""Models for tests: operated on, with used norms, counted and compared."""

from __future__ import annotations

import torch
from torch import nn

from polyfed.core.method import parse


def operated(model: nn.Module, text: str = "fedwon") -> nn.Module:
    """The model after the surgery of a method."""
    for operate in parse(text).surgery:
        model = operate(model)
    return model


def used_norm(channels: int = 6, seed: int = 0) -> nn.BatchNorm2d:
    """A batch norm as a pretrained network has it."""
    stream = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.copy_(torch.rand(channels, generator=stream) + 0.5)
    return norm


def parameters(model: nn.Module) -> int:
    """How many numbers a model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have equal entries."""
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][name], states[1][name]) for name in states[0])
