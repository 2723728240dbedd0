"""The gradient of a batch, clipped sample by sample, in one backward pass.

    g_i = gradient of the loss of sample i over all parameters;   sum_i min(1, clip / ||g_i||) g_i

The norms come first, from each layer's input and the gradient of its output. Most layers need no g_i for that (ghost clipping): a linear layer's
is ||input|| ||output gradient||, a convolution's comes from two small Gram matrices. The sum is then made layer by layer from the same output
gradients, each sample's scaled by its factor. opacus knows the per-sample gradients of torch's layers; those of this file are the rest.

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
"""From a layer, its inputs and the gradient of its output to something of each sample, by parameter."""

MAX_POWER = 100
"""Two to this power, and one over it, are numbers in single precision."""

NEEDS_OPACUS = "Differential privacy needs opacus. Install it with: pip install 'polyfed[privacy]'"


@dataclass
class Call:
    """One use of a layer in a forward pass."""

    layer: nn.Module
    inputs: tuple[Tensor, ...]
    edge: GradientEdge
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class Clipped:
    """What came of a batch: the loss and the gradient norm of each sample, and the sum of clipped gradients by parameter."""

    losses: Tensor
    norms: Tensor
    gradients: Mapping[nn.Parameter, Tensor]


def clipped_gradients(model: nn.Module, losses: Callable[[], Tensor], clip: float) -> Clipped:
    """Sum the gradients of a batch with each sample's clipped to a norm.

    Args:
        model: whose trainable parameters are meant.
        losses: runs the model and gives the loss of each sample, which depends on no other sample.
        clip: largest norm of one sample's gradient over all parameters.
    """
    with recorded(model) as calls:
        values = losses()
    calls, slopes = used(calls, values)
    uses = Counter(parameter for call in calls for parameter in call.parameters)
    tied = {parameter for parameter, count in uses.items() if count > 1}
    with torch.no_grad():
        whole = summed_samples(calls, slopes, tied)
        parts = [lengths(each) for each in whole.values()]
        parts += [norm for call, slope in zip(calls, slopes, strict=True) for norm in norms_of(call, slope, tied)]
        norms = lengths(torch.stack([torch.zeros_like(values), *parts]).T)
        factors = factors_for(norms, clip)
    gradients = {parameter: torch.tensordot(factors.to(each.dtype), each, 1) for parameter, each in whole.items()}
    for call, slope in zip(calls, slopes, strict=True):
        own = [parameter for parameter in call.parameters if parameter not in tied]
        if own:
            scaled = slope * factors.to(slope.dtype).reshape(-1, *[1] * (slope.dim() - 1))
            found = torch.autograd.grad([call.edge], own, [scaled], retain_graph=True, allow_unused=True)
            gradients |= {parameter: value for parameter, value in zip(own, found, strict=True) if value is not None}
    return Clipped(values.detach(), norms, gradients)


def factors_for(norms: Tensor, clip: float) -> Tensor:
    """By what each sample is scaled. One whose norm is not finite, or for which a factor is too small to be exact, counts as zero."""
    tiny = torch.finfo(norms.dtype).tiny
    factors = (clip / norms.clamp_min(tiny)).clamp(max=1.0)
    return torch.where(torch.isfinite(norms) & (factors >= tiny), factors, 0.0)


def used(calls: Sequence[Call], losses: Tensor) -> tuple[list[Call], list[Tensor]]:
    """The uses of layers that the losses depend on, each with the gradient of its output."""
    if not calls:
        return [], []
    found = torch.autograd.grad(losses.sum(), [call.edge for call in calls], retain_graph=True, allow_unused=True)
    pairs = [(call, slope) for call, slope in zip(calls, found, strict=True) if slope is not None]
    return [call for call, _ in pairs], [slope for _, slope in pairs]


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """Note every use of a layer that has trainable parameters of its own."""
    calls: list[Call] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        parameters = tuple(parameter for parameter in layer.parameters(recurse=False) if parameter.requires_grad)
        if not isinstance(output, Tensor) or not all(isinstance(value, Tensor) for value in inputs):
            raise ModelError(
                f"{type(layer).__name__} takes or gives more than tensors, so gradients by sample cannot be made from it."
            )
        # The edge, not the output: an activation that works in place would put its own gradient there.
        calls.append(Call(layer, tuple(value.detach() for value in inputs), get_gradient_edge(output), parameters))

    owners = [layer for layer in model.modules() if any(p.requires_grad for p in layer.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(note) for layer in owners]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def summed_samples(calls: Sequence[Call], slopes: Sequence[Tensor], tied: set[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """The gradient of each sample for parameters that are used more than once: the norm of a sum is not the sum of norms."""
    found: dict[nn.Parameter, Tensor] = {}
    for call, slope in zip(calls, slopes, strict=True):
        if tied.isdisjoint(call.parameters):
            continue
        for parameter, each in gradient_sampler(call.layer)(call.layer, call.inputs, slope).items():
            if parameter in tied:
                assert isinstance(parameter, nn.Parameter)
                found[parameter] = found[parameter] + each if parameter in found else each
    return found


def norms_of(call: Call, slope: Tensor, tied: set[nn.Parameter]) -> list[Tensor]:
    """The norms of each sample's gradient, one row for each parameter of a layer."""
    known = norm_samplers().get(type(call.layer))
    if known is not None and tied.isdisjoint(call.parameters):
        found = known(call.layer, call.inputs, slope)
        # opacus has no norms for some shapes, such as a linear layer on images; then the general way follows.
        if all(parameter in found for parameter in call.parameters):
            return [found[parameter] for parameter in call.parameters]
    if tied.issuperset(call.parameters):
        return []
    every = gradient_sampler(call.layer)(call.layer, call.inputs, slope)
    return [lengths(every[parameter]) for parameter in call.parameters if parameter not in tied]


def scaled(each: Tensor) -> tuple[Tensor, Tensor]:
    """Every sample over a power of two near its largest number, which loses no bit, and these powers.

    Squares of what comes out neither vanish nor overflow. In single precision those of gradients below 1e-22 vanish, and whoever chooses the
    weights chooses how large gradients are.
    """
    largest = torch.linalg.vector_norm(each.flatten(1), torch.inf, 1)
    powers = torch.exp2(torch.frexp(largest).exponent.clamp(-MAX_POWER, MAX_POWER).to(each.dtype))
    return each / powers.reshape(-1, *[1] * (each.dim() - 1)), powers


def lengths(each: Tensor) -> Tensor:
    """The norm of each sample."""
    rows, powers = scaled(each)
    return rows.flatten(1).square().sum(1).sqrt() * powers


def gradient_sampler(layer: nn.Module) -> Sampler:
    """What makes the gradients of each sample for a layer: opacus' own, or the general way."""
    plain = getattr(layer, "padding_mode", "zeros") == "zeros"  # opacus pads with zeros whatever the layer says
    known: Sampler = gradient_samplers().get(type(layer), by_vjp) if plain else by_vjp
    return known


@functools.cache
def gradient_samplers() -> Mapping[type[nn.Module], Sampler]:
    """Per-sample gradients by type of layer: opacus' and ours."""
    try:
        from opacus.grad_sample import GradSampleModule
    except ImportError as error:
        raise MissingExtra(NEEDS_OPACUS) from error
    norms: dict[type[nn.Module], Sampler] = dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), frozen_batch_norm)
    return {**GradSampleModule.GRAD_SAMPLERS, **norms}


@functools.cache
def norm_samplers() -> Mapping[type[nn.Module], Sampler]:
    """Norms of per-sample gradients by type of layer, without the gradients: opacus' and ours."""
    try:
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    except ImportError as error:
        raise MissingExtra(NEEDS_OPACUS) from error
    known: Sampler = GradSampleModuleFastGradientClipping.NORM_SAMPLERS[nn.Linear]
    return {nn.Linear: functools.partial(linear_norms, known), nn.Conv2d: plain_norms, WSConv2d: standardised_norms}


def linear_norms(known: Sampler, layer: nn.Linear, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """The norm of each sample's gradient for a linear layer, by opacus' way on scaled numbers."""
    seen, seen_powers = scaled(inputs[0].to(slope.dtype))
    push, push_powers = scaled(slope)
    found = known(layer, [seen], push)
    return {p: norm * push_powers * (seen_powers if p is layer.weight else 1) for p, norm in found.items()}


def by_vjp(layer: nn.Module, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """Per-sample gradients of any layer, by running it on each sample alone."""
    names = {name: p for name, p in layer.named_parameters(recurse=False) if p.requires_grad}

    def gradients(rows: tuple[Tensor, ...], row: Tensor) -> dict[str, Tensor]:
        def run(own: dict[str, Tensor]) -> Any:
            return functional_call(layer, own, tuple(value[None] for value in rows))

        found: dict[str, Tensor] = vjp(run, {name: p.detach() for name, p in names.items()})[1](row[None])[0]
        return found

    found = vmap(gradients, randomness="error")(tuple(inputs), slope)
    return {names[name]: each for name, each in found.items()}


def frozen_batch_norm(layer: BatchNorm, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """Per-sample gradients of batch norm's scale and shift while it normalises with fixed statistics."""
    if layer.training or layer.running_mean is None or layer.running_var is None:
        raise ModelError(
            "Batch norm that normalises by the batch has no gradients by sample: every sample changes those of the others."
        )
    shape = (1, -1, *[1] * (slope.dim() - 2))
    normal = (inputs[0] - layer.running_mean.reshape(shape)) * (layer.running_var + layer.eps).rsqrt().reshape(shape)
    places = tuple(range(2, slope.dim()))
    made = {layer.weight: normal * slope, layer.bias: slope}
    return {p: (each.sum(places) if places else each) for p, each in made.items() if p is not None and p.requires_grad}


def columns(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What each filter sees at each place: (sample, group, weight of a filter, place)."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    seen = F.unfold(padded, layer.kernel_size, layer.dilation, 0, layer.stride)
    return seen.reshape(len(x), layer.groups, -1, seen.shape[-1])


def gram_is_cheaper(layer: nn.Conv2d, places: int) -> bool:
    """Whether two Gram matrices over places, in double precision, take less work than the gradients of all filters."""
    weights, filters = layer.weight[0].numel(), layer.out_channels // layer.groups
    return 2 * places * (weights + filters) < weights * filters


def gram_squares(seen: Tensor, slope: Tensor) -> Tensor:
    """||slope seen^T||^2 of each sample from products between places. In double precision, since parts of it are subtracted later."""
    wide, tall = seen.double(), slope.double()
    products = (wide.transpose(-1, -2) @ wide) * (tall.transpose(-1, -2) @ tall)
    return products.sum((-3, -2, -1)).clamp_min(0)


def plain_norms(layer: nn.Conv2d, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """The norm of each sample's gradient for a convolution."""
    seen, by_place = columns(layer, inputs[0]), slope.reshape(len(slope), layer.groups, -1, slope[0, 0].numel())
    found: dict[Tensor, Tensor] = {}
    if gram_is_cheaper(layer, seen.shape[-1]):
        found[layer.weight] = gram_squares(seen, by_place).sqrt().to(slope.dtype)
    else:
        found[layer.weight] = lengths(by_place @ seen.transpose(-1, -2))
    if layer.bias is not None:
        found[layer.bias] = lengths(by_place.sum(-1))
    return found


def standardised_norms(layer: WSConv2d, inputs: Sequence[Tensor], slope: Tensor) -> dict[Tensor, Tensor]:
    """The norm of each sample's gradient for a convolution with standardised weights.

    With G the gradient for the standardised weight of a filter, c = w - mean(w) and k = gamma gain / spread:
    the gradient for w is k (G - mean(G) - (G.c) c / ||c||^2), where the last part falls away while the spread stands at its floor,
    and that for the gain is gamma (G.c) / spread.
    """
    seen, by_place = columns(layer, inputs[0]), slope.reshape(len(slope), layer.groups, -1, slope[0, 0].numel())
    centred, spread = layer.centred_and_spread()
    filters = centred.reshape(layer.groups, -1, seen.shape[2])
    factor = (layer.gamma / spread).reshape(layer.groups, -1)
    scale = factor if layer.gain is None else factor * layer.gain.reshape(layer.groups, -1)
    length = filters.square().sum(-1)
    free = spread.reshape(layer.groups, -1).square() > layer.floor
    along = torch.where(free, 1 / length.clamp_min(torch.finfo(length.dtype).tiny), 0.0)
    found: dict[Tensor, Tensor] = {}
    if gram_is_cheaper(layer, seen.shape[-1]):
        dot = (by_place * (filters @ seen)).sum(-1)
        total = (by_place * seen.sum(2, keepdim=True)).sum(-1)
        lost = scale.double().square() * (total.double().square() / seen.shape[2] + dot.double().square() * along)
        squares = gram_squares(seen, by_place * scale[None, :, :, None]) - lost.sum((1, 2))
        found[layer.weight] = squares.clamp_min(0).sqrt().to(slope.dtype)
    else:
        whole = by_place @ seen.transpose(-1, -2)
        dot = (whole * filters).sum(-1)
        rest = whole - whole.mean(-1, keepdim=True) - (dot * along)[..., None] * filters
        found[layer.weight] = lengths(rest * scale[..., None])
    if layer.gain is not None:
        found[layer.gain] = lengths(dot * factor)
    if layer.bias is not None:
        found[layer.bias] = lengths(by_place.sum(-1))
    return found
