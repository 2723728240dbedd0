"""Fixup: residual networks without norms. Differences from the paper: docs/methods/fixup.md."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from polyfed.core.client import Step
from polyfed.core.entries import BatchNorm
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.workbench import Workbench
from polyfed.errors import ModelError, OptionError
from polyfed.models.layers.surgery import plain_batch_norm, replace_modules
from polyfed.models.layers.ws_conv import geometry, plain_kind

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


def scalar(value: float, like: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), value, dtype=like.dtype, device=like.device))


class ScalarShift(nn.Module):
    """Adds one learnable number, optionally after multiplying by another."""

    def __init__(self, like: Tensor, multiply: bool = False) -> None:
        super().__init__()
        self.multiplier = scalar(1.0, like) if multiply else None
        self.shift = scalar(0.0, like)

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = (x if self.multiplier is None else x * self.multiplier) + self.shift
        return shifted


class FixupConv2d(nn.Conv2d):
    """A convolution with a learnable number added to its input."""

    input_shift: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.input_shift)


class FixupLinear(nn.Linear):
    """A linear layer with a learnable number added to its input."""

    input_shift: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.input_shift)


@dataclass(frozen=True)
class Branch:
    """The layers of one residual branch, in order, and those of its shortcut."""

    convolutions: list[nn.Module]
    last_norm: nn.Module
    shortcut: list[nn.Module]


def traced(model: nn.Module) -> fx.Graph:
    try:
        return fx.Tracer().trace(model)
    except Exception as error:
        raise ModelError(
            f"fixup: the layers of {type(model).__name__} cannot be traced ({type(error).__name__}: {error}). Use a residual network such as resnet20."
        ) from error


def ancestors(node: fx.Node) -> set[fx.Node]:
    """Return the node and everything that it is computed from."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        here = waiting.pop()
        if here not in found:
            found.add(here)
            waiting += here.all_input_nodes
    return found


def branches_of(model: nn.Module, graph: fx.Graph) -> list[Branch]:
    """Return the residual branches: at each addition, the side with more convolutions, without the layers that both sides share."""
    order = list(graph.nodes)
    found = []
    for node in order:
        if node.target not in ADDITIONS or len(node.all_input_nodes) != 2:
            continue
        one, other = (ancestors(side) for side in node.all_input_nodes)
        sides = [
            [model.get_submodule(str(n.target)) for n in order if n in own and n.op == "call_module"]
            for own in (one - other, other - one)
        ]
        short, long = sorted(sides, key=_convolutions)
        if _convolutions(long) > 0:
            found.append(_branch(model, long, short))
    if not found:
        raise ModelError(
            f"fixup: {type(model).__name__} has no residual branch with convolutions. Use a residual network such as resnet20, or fedavg + no_norm."
        )
    return found


def _convolutions(layers: list[nn.Module]) -> int:
    return sum(isinstance(layer, nn.Conv2d) for layer in layers)


def _branch(model: nn.Module, layers: list[nn.Module], shortcut: list[nn.Module]) -> Branch:
    places = [index for index, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    behind = [layer for layer in layers[places[-1] :] if isinstance(layer, BatchNorm)]
    if len(behind) != 1 or _convolutions(shortcut) >= len(places):
        raise ModelError(
            f"fixup: {type(model).__name__} has a residual branch that does not end in a convolution and a batch norm, or two parallel branches. "
            "Use a residual network such as resnet20 or those of torchvision."
        )
    return Branch([layers[index] for index in places], behind[0], shortcut)


@torch.no_grad()
def initialise(branches: list[Branch]) -> None:
    """Initialise every branch to zero, and scale its other convolutions by their number."""
    for branch in branches:
        *others, last = branch.convolutions
        for convolution in others:
            assert isinstance(convolution, nn.Conv2d)
            fan_out = convolution.out_channels * math.prod(convolution.kernel_size)
            factor = len(branches) ** (-1 / (2 * len(branch.convolutions) - 2))
            convolution.weight.normal_(0.0, math.sqrt(2 / fan_out) * factor)
        for parameter in last.parameters():
            parameter.zero_()


def with_input_shift(layer: nn.Module) -> nn.Module:
    """Return the same layer, with a learnable number added to its input."""
    made: FixupConv2d | FixupLinear
    if isinstance(layer, nn.Conv2d):
        plain_kind(layer)
        made = FixupConv2d(**geometry(layer), bias=layer.bias is not None)
    else:
        assert isinstance(layer, nn.Linear)
        made = FixupLinear(layer.in_features, layer.out_features, layer.bias is not None)
    made.weight, made.bias = layer.weight, layer.bias
    made.input_shift = scalar(0.0, made.weight)
    return made.train(layer.training)


@dataclass(frozen=True)
class ToFixup(Part):
    """Remove batch norm from a residual network, and insert the scalars of Fixup."""

    stage = "blocks"

    def __call__(self, model: nn.Module) -> nn.Module:
        graph = traced(model)
        branches = branches_of(model, graph)
        head = self.head(model, graph)
        initialise(branches)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
        last = {branch.last_norm for branch in branches}
        shortcuts = {layer for branch in branches for layer in branch.shortcut}
        inside = {layer for branch in branches for layer in branch.convolutions} | {
            c for c in shortcuts if isinstance(c, nn.Conv2d)
        }

        def without_norm(norm: nn.Module) -> nn.Module:
            weight = plain_batch_norm(norm, "fixup").running_mean
            like = head.weight if weight is None else weight
            return nn.Identity() if norm in shortcuts else ScalarShift(like, multiply=norm in last)

        replace_modules(model, lambda module: isinstance(module, BatchNorm), without_norm)
        replace_modules(model, lambda module: module in inside or module is head, with_input_shift)
        return model

    def head(self, model: nn.Module, graph: fx.Graph) -> nn.Linear:
        """Return the linear layer that computes the logits."""
        made_by = next(node for node in graph.nodes if node.op == "output").all_input_nodes
        if len(made_by) == 1 and made_by[0].op == "call_module":
            layer = model.get_submodule(str(made_by[0].target))
            if isinstance(layer, nn.Linear):
                return layer
        raise ModelError(f"fixup: {type(model).__name__} does not end with a linear layer, which Fixup initialises to zero.")


@dataclass(frozen=True)
class SlowScalars(Part):
    """Train the scalars with a fraction of the learning rate by scaling their gradients."""

    share: float
    reads_data = False

    def __call__(self, step: Step) -> None:
        for module in step.client.model.modules():
            if isinstance(module, ScalarShift | FixupConv2d | FixupLinear):
                scalars = module.parameters() if isinstance(module, ScalarShift) else [module.input_shift]
                for parameter in scalars:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.share)

    def check(self, bench: Workbench) -> None:
        if bench.settings.optimizer != "sgd":
            raise OptionError(
                f"fixup: scalar_lr={self.share} scales gradients, which has no effect with {bench.settings.optimizer}. Use --optimizer sgd, or fixup(scalar_lr=1.0)."
            )


@register
def fixup(scalar_lr: float = 0.1) -> Method:
    """Remove batch norm from a residual network, and initialise it as in Fixup.

        L residual branches with m convolutions each (ResNet-20: L = 9, m = 2):
        classifier = 0;   last convolution of every branch = 0
        other convolutions of a branch:   normal with std = sqrt(2 / (C_out k k)) * L^(-1/(2m - 2))
        scalar bias (0) before every convolution of a block, every activation, and the classifier
        scalar multiplier (1) after the last convolution of every branch

        block:   relu(shortcut(x) + multiplier * conv2(relu(conv1(x + b1) + b2) + b3) + b4)

    Args:
        scalar_lr: learning rate of the scalars as a fraction of the run's learning rate.

    Reference:
        H. Zhang, Y. N. Dauphin and T. Ma. Fixup Initialization: Residual Learning Without Normalization. ICLR 2019. Also in
        FixBN Table 5.
    """
    if scalar_lr <= 0:
        raise OptionError(f"fixup: scalar_lr must be positive, got {scalar_lr}.")
    slow = (SlowScalars(scalar_lr),) if scalar_lr != 1.0 else ()
    return Method("fixup", surgery=(ToFixup(),), gradients=slow, standalone=False, facts=Facts(smallest_batch=1))
