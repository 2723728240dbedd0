"""Gradients clipped per sample, in one backward pass.

    g_i = gradient of the loss of sample i over all parameters;   sum_i min(1, clip / ||g_i||) g_i

First, the norms are computed from each layer's input and output gradient. Most layers do not need g_i for this (ghost clipping): the norm
of a linear layer is ||input|| ||output gradient||, that of a convolution follows from two small Gram matrices. Then the sum is computed
layer by layer from the output gradients, scaled per sample. opacus covers torch's layers, this file the others.

References: Goodfellow, Efficient Per-Example Gradient Computations, 2015; Li et al., Large Language Models Can Be Strong Differentially Private
Learners, ICLR 2022 (ghost clipping); Bu et al., Differentially Private Optimization on Large Model at Small Cost, ICML 2023 (one backward pass).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.nn import functional as F

from polyfed.core.entries import BatchNorm
from polyfed.errors import MissingExtra, ModelError
from polyfed.models.layers.ws_conv import WSConv2d

Sampler: TypeAlias = Callable[[Any, Sequence[Tensor], Tensor], Mapping[Tensor, Tensor]]
"""Computes per-sample gradients or norms, by parameter, from a layer, its inputs and the gradient of its output."""

MAX_POWER = 100
"""Two to this power and its inverse are exact in single precision."""

NEEDS_OPACUS = "Differential privacy needs opacus. Install it with: pip install 'polyfed[privacy]'"


@dataclass
class Call:
    layer: nn.Module
    inputs: tuple[Tensor, ...]
    edge: GradientEdge
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class Clipped:
    """Loss and gradient norm of each sample, and the sum of the clipped gradients by parameter."""

    losses: Tensor
    norms: Tensor
    gradients: Mapping[nn.Parameter, Tensor]


def clipped_gradients(model: nn.Module, losses: Callable[[], Tensor], clip: float) -> Clipped:
    """Sum the gradients of a batch, each clipped to a norm.

    Args:
        model: The model with the trainable parameters.
        losses: Runs the model and returns the loss of each sample, which must not depend on other samples.
        clip: Maximum norm of the gradient of one sample over all parameters.
    """
    with record_calls(model) as calls:
        values = losses()
    calls, slopes = calls_with_gradients(calls, values)
    uses = Counter(parameter for call in calls for parameter in call.parameters)
    tied = {parameter for parameter, count in uses.items() if count > 1}
    with torch.no_grad():
        whole = tied_gradients(calls, slopes, tied)
        parts = [row_norms(each) for each in whole.values()]
        parts += [norm for call, slope in zip(calls, slopes, strict=True) for norm in layer_norms(call, slope, tied)]
        norms = row_norms(torch.stack([torch.zeros_like(values), *parts]).T)
        factors = clipping_factors(norms, clip)
    gradients = {parameter: torch.tensordot(factors.to(each.dtype), each, 1) for parameter, each in whole.items()}
    for call, slope in zip(calls, slopes, strict=True):
        own = [parameter for parameter in call.parameters if parameter not in tied]
        if own:
            clipped = slope * factors.to(slope.dtype).reshape(-1, *[1] * (slope.dim() - 1))
            found = torch.autograd.grad([call.edge], own, [clipped], retain_graph=True, allow_unused=True)
            gradients |= {parameter: value for parameter, value in zip(own, found, strict=True) if value is not None}
    return Clipped(values.detach(), norms, gradients)


def clipping_factors(norms: Tensor, clip: float) -> Tensor:
    """Return the factor of each sample: 0 if its norm is NaN or infinite, or if the factor would be subnormal."""
    tiny = torch.finfo(norms.dtype).tiny
    factors = (clip / norms.clamp_min(tiny)).clamp(max=1.0)
    return torch.where(torch.isfinite(norms) & (factors >= tiny), factors, 0.0)


def calls_with_gradients(calls: Sequence[Call], losses: Tensor) -> tuple[list[Call], list[Tensor]]:
    """Return the calls that the losses depend on, and the gradients of their outputs."""
    if not calls:
        return [], []
    found = torch.autograd.grad(losses.sum(), [call.edge for call in calls], retain_graph=True, allow_unused=True)
    pairs = [(call, slope) for call, slope in zip(calls, found, strict=True) if slope is not None]
    return [call for call, _ in pairs], [slope for _, slope in pairs]


@contextmanager
def record_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Record every call of a layer that directly contains trainable parameters."""
    calls: list[Call] = []

    def record(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        parameters = tuple(parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad)
        if not isinstance(output, Tensor) or not all(isinstance(value, Tensor) for value in inputs):
            raise ModelError(
                f"Cannot compute per-sample gradients of {type(layer).__name__}: its inputs or output are not tensors."
            )
        # The edge instead of the output, because an activation may change the output in place.
        calls.append(Call(layer, tuple(value.detach() for value in inputs), get_gradient_edge(output), parameters))

    owners = [layer for layer in model.modules() if any(p.requires_grad for p in layer.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(record) for layer in owners]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def tied_gradients(calls: Sequence[Call], slopes: Sequence[Tensor], tied: set[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the per-sample gradients of parameters that are used more than once, whose norms are not sums of norms per call."""
    found: dict[nn.Parameter, Tensor] = {}
    for call, slope in zip(calls, slopes, strict=True):
        if tied.isdisjoint(call.parameters):
            continue
        for parameter, each in gradient_sampler(call.layer)(call.layer, call.inputs, slope).items():
            if parameter in tied:
                assert isinstance(parameter, nn.Parameter)
                found[parameter] = found[parameter] + each if parameter in found else each
    return found


def layer_norms(call: Call, slope: Tensor, tied: set[nn.Parameter]) -> list[Tensor]:
    """Return the norms of the per-sample gradients, with one tensor per parameter of a layer."""
    known = norm_samplers().get(type(call.layer))
    if known is not None and tied.isdisjoint(call.parameters):
        found = known(call.layer, call.inputs, slope)
        # For some shapes, such as images in a linear layer, opacus returns no norms.
        if all(parameter in found for parameter in call.parameters):
            return [found[parameter] for parameter in call.parameters]
    if tied.issuperset(call.parameters):
        return []
    every = gradient_sampler(call.layer)(call.layer, call.inputs, slope)
    return [row_norms(every[parameter]) for parameter in call.parameters if parameter not in tied]


def scale_rows(each: Tensor) -> tuple[Tensor, Tensor]:
    """Divide every sample by a power of two near its largest value, which is exact. Return the quotients and the powers.

    Squares of the quotients neither underflow nor overflow. Without scaling, squares of gradients below 1e-22 vanish in single precision,
    and the party that chooses the weights controls the size of the gradients.
    """
    largest = torch.linalg.vector_norm(each.flatten(1), torch.inf, 1)
    powers = torch.exp2(torch.frexp(largest).exponent.clamp(-MAX_POWER, MAX_POWER).to(each.dtype))
    return each / powers.reshape(-1, *[1] * (each.dim() - 1)), powers


def row_norms(each: Tensor) -> Tensor:
    rows, powers = scale_rows(each)
    return rows.flatten(1).square().sum(1).sqrt() * powers


def gradient_sampler(layer: nn.Module) -> Sampler:
    plain = getattr(layer, "padding_mode", "zeros") == "zeros"  # opacus ignores the padding mode and pads with zeros
    known: Sampler = gradient_samplers().get(type(layer), by_vjp) if plain else by_vjp
    return known


@functools.cache
def gradient_samplers() -> Mapping[type[nn.Module], Sampler]:
    """Return the functions for per-sample gradients by layer type, from opacus and this file."""
    try:
        from opacus.grad_sample import GradSampleModule
    except ImportError as error:
        raise MissingExtra(NEEDS_OPACUS) from error
    norms: dict[type[nn.Module], Sampler] = dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), frozen_batch_norm)
    return {**GradSampleModule.GRAD_SAMPLERS, **norms}


@functools.cache
def norm_samplers() -> Mapping[type[nn.Module], Sampler]:
    """Return the functions for norms of per-sample gradients by layer type, from opacus and this file."""
    try:
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    except ImportError as error:
        raise MissingExtra(NEEDS_OPACUS) from error
    known: Sampler = GradSampleModuleFastGradientClipping.NORM_SAMPLERS[nn.Linear]
    return {nn.Linear: functools.partial(linear_norms, known), nn.Conv2d: plain_norms, WSConv2d: standardised_norms}


def linear_norms(known: Sampler, layer: nn.Linear, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """Compute the norms of a linear layer with opacus, on scaled values."""
    x, x_powers = scale_rows(inputs[0].to(slope.dtype))
    scaled_slope, slope_powers = scale_rows(slope)
    found = known(layer, [x], scaled_slope)
    return {p: norm * slope_powers * (x_powers if p is layer.weight else 1) for p, norm in found.items()}


def by_vjp(layer: nn.Module, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """Compute the per-sample gradients of any layer by running it on each sample alone."""
    names = {name: p for name, p in layer.named_parameters(recurse=False) if p.requires_grad}

    def gradients(rows: tuple[Tensor, ...], row: Tensor) -> dict[str, Tensor]:
        def run(own: dict[str, Tensor]) -> Any:
            return functional_call(layer, own, tuple(value[None] for value in rows))

        found: dict[str, Tensor] = vjp(run, {name: p.detach() for name, p in names.items()})[1](row[None])[0]
        return found

    found = vmap(gradients, randomness="error")(tuple(inputs), slope)
    return {names[name]: each for name, each in found.items()}


def frozen_batch_norm(layer: BatchNorm, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """Compute the per-sample gradients of a batch norm with fixed statistics."""
    if layer.training or layer.running_mean is None or layer.running_var is None:
        raise ModelError(
            "Batch norm in training mode has no per-sample gradients, because every sample affects the outputs of the others."
        )
    shape = (1, -1, *[1] * (slope.dim() - 2))
    normal = (inputs[0] - layer.running_mean.reshape(shape)) * (layer.running_var + layer.eps).rsqrt().reshape(shape)
    positions = tuple(range(2, slope.dim()))
    found = {layer.weight: normal * slope, layer.bias: slope}
    return {p: (each.sum(positions) if positions else each) for p, each in found.items() if p is not None and p.requires_grad}


def columns(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the input of each filter at each position: (sample, group, weight of a filter, position)."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    seen = F.unfold(padded, layer.kernel_size, layer.dilation, 0, layer.stride)
    return seen.reshape(len(x), layer.groups, -1, seen.shape[-1])


def gram_is_cheaper(layer: nn.Conv2d, positions: int) -> bool:
    """Return True if two Gram matrices over positions, in double precision, need less work than the gradients of all filters."""
    weights, filters = layer.weight[0].numel(), layer.out_channels // layer.groups
    return 2 * positions * (weights + filters) < weights * filters


def gram_squares(seen: Tensor, slope: Tensor) -> Tensor:
    """Compute ||slope seen^T||^2 per sample from Gram matrices, in double precision because values are subtracted from it later."""
    wide, tall = seen.double(), slope.double()
    products = (wide.transpose(-1, -2) @ wide) * (tall.transpose(-1, -2) @ tall)
    return products.sum((-3, -2, -1)).clamp_min(0)


def plain_norms(layer: nn.Conv2d, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """Compute the norms of a convolution."""
    seen, by_position = columns(layer, inputs[0]), slope.reshape(len(slope), layer.groups, -1, slope[0, 0].numel())
    found: dict[Tensor, Tensor] = {}
    if gram_is_cheaper(layer, seen.shape[-1]):
        found[layer.weight] = gram_squares(seen, by_position).sqrt().to(slope.dtype)
    else:
        found[layer.weight] = row_norms(by_position @ seen.transpose(-1, -2))
    if layer.bias is not None:
        found[layer.bias] = row_norms(by_position.sum(-1))
    return found


def standardised_norms(layer: WSConv2d, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """Compute the norms of a convolution with standardised weights.

    Let G be the gradient for the standardised weight of a filter, c = w - mean(w) and k = gamma gain / spread.
    The gradient for w is k (G - mean(G) - (G.c) c / ||c||^2), without the last term if the spread is at its floor.
    The gradient for the gain is gamma (G.c) / spread.
    """
    seen, by_position = columns(layer, inputs[0]), slope.reshape(len(slope), layer.groups, -1, slope[0, 0].numel())
    centred, spread = layer.centred_and_spread()
    filters = centred.reshape(layer.groups, -1, seen.shape[2])
    factor = (layer.gamma / spread).reshape(layer.groups, -1)
    scale = factor if layer.gain is None else factor * layer.gain.reshape(layer.groups, -1)
    length = filters.square().sum(-1)
    free = spread.reshape(layer.groups, -1).square() > layer.floor
    along = torch.where(free, 1 / length.clamp_min(torch.finfo(length.dtype).tiny), 0.0)
    found: dict[Tensor, Tensor] = {}
    if gram_is_cheaper(layer, seen.shape[-1]):
        dot = (by_position * (filters @ seen)).sum(-1)
        total = (by_position * seen.sum(2, keepdim=True)).sum(-1)
        lost = scale.double().square() * (total.double().square() / seen.shape[2] + dot.double().square() * along)
        squares = gram_squares(seen, by_position * scale[None, :, :, None]) - lost.sum((1, 2))
        found[layer.weight] = squares.clamp_min(0).sqrt().to(slope.dtype)
    else:
        whole = by_position @ seen.transpose(-1, -2)
        dot = (whole * filters).sum(-1)
        rest = whole - whole.mean(-1, keepdim=True) - (dot * along)[..., None] * filters
        found[layer.weight] = row_norms(rest * scale[..., None])
    if layer.gain is not None:
        found[layer.gain] = row_norms(dot * factor)
    if layer.bias is not None:
        found[layer.bias] = row_norms(by_position.sum(-1))
    return found
