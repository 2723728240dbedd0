"""MixStyle: feature statistics mixed between samples. Differences from the paper: docs/methods/mixstyle.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.entries import NORM_FAMILIES, layer_family
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.errors import ModelError, OptionError, nearest
from polyfed.models.layers.surgery import stages_of

EPS = 1e-6
RESNET_STAGES = ("layer1", "layer2", "layer3")


def mixed(x: Tensor, share: Tensor, partner: Tensor) -> Tensor:
    """Return features with mixed styles; ``share`` is lambda per sample, ``partner`` the index of its partner."""
    if math.prod(x.shape[2:]) < 2:
        raise ModelError(
            f"mixstyle: features of shape {tuple(x.shape[1:])} have one position, so their standard deviation is undefined. Use larger inputs, or earlier places (after=...)."
        )
    axes = tuple(range(2, x.dim()))
    mean = x.mean(axes, keepdim=True).detach()
    spread = (x.var(axes, keepdim=True) + EPS).sqrt().detach()
    share = share.view(-1, *([1] * (x.dim() - 1)))
    return (x - mean) / spread * torch.lerp(spread[partner], spread, share) + torch.lerp(mean[partner], mean, share)


class MixAfter:
    """A forward hook that mixes the styles of a module's output while the whole model trains."""

    def __init__(self, model: nn.Module, p: float, alpha: float) -> None:
        # Use the mode of the model, not of the module, because a part may freeze a single layer (fixbn).
        self.model, self.p, self.alpha = model, p, alpha

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not self.model.training or float(torch.rand(())) >= self.p:
            return None
        exact = torch.promote_types(output.dtype, torch.float32)  # torch has no Beta distribution in half precision
        alpha = torch.tensor(self.alpha, dtype=exact, device=output.device)
        share = torch.distributions.Beta(alpha, alpha).sample((len(output),)).to(output.dtype)
        return mixed(output, share, torch.randperm(len(output), device=output.device))


def places(model: nn.Module, after: str | tuple[str, ...]) -> list[str]:
    """Return the paths of the modules after which styles are mixed."""
    paths = [path for path, _ in model.named_modules() if path]
    stages = stages_of(model)
    names = (after,) if isinstance(after, str) else tuple(after)
    if after == "auto":
        names = tuple(name for name in RESNET_STAGES if name in stages)
        if not names:
            return first_blocks(model)
    found: dict[str, None] = {}
    for name in names:
        here = [path for path in paths if fnmatchcase(path, name) or path.endswith(f".{name}")]
        if not here:
            raise ModelError(
                f"mixstyle: {type(model).__name__} has no module {name!r} to mix styles after. {nearest(name, stages or paths[:12])}"
            )
        found |= dict.fromkeys(here)
    return list(found)


def first_blocks(model: nn.Module) -> list[str]:
    """Return the last module of each of the first convolutional blocks: a convolution with its norm and activation."""
    convolutions = [path for path, module in model.named_modules() if layer_family(module) == "convolution" and path]
    if not convolutions:
        raise ModelError(f"mixstyle: {type(model).__name__} has no convolution, so it has no feature maps to mix.")
    return [_end_of_block(model, path) for path in (convolutions[:-1] or convolutions)[:3]]


def _end_of_block(model: nn.Module, path: str) -> str:
    parent, _, own = path.rpartition(".")
    holder = model.get_submodule(parent)
    if not isinstance(holder, nn.Sequential):
        return path
    keys = list(holder._modules)
    last = own
    for key in keys[keys.index(own) + 1 :]:
        follower = holder._modules[key]
        activation = type(follower).__module__ == nn.ReLU.__module__
        if follower is None or not (activation or layer_family(follower) in NORM_FAMILIES):
            break
        last = key
    return f"{parent}.{last}" if parent else last


@dataclass(frozen=True)
class InsertMixStyle(Part):
    """Mix styles after the selected modules. Entries keep their names, since nothing is renamed or wrapped."""

    after: str | tuple[str, ...]
    p: float
    alpha: float
    stage = "features"
    commutes = True
    mixes_samples = True

    def __call__(self, model: nn.Module) -> nn.Module:
        hook = MixAfter(model, self.p, self.alpha)
        for path in places(model, self.after):
            model.get_submodule(path).register_forward_hook(hook)
        return model


@register
def mixstyle(p: float = 0.5, alpha: float = 0.1, after: str | tuple[str, ...] = "auto") -> Method:
    """Mix the styles of samples inside the network, in training.

        mu, sig:  mean and standard deviation over positions, for each sample and channel (unbiased variance + 1e-6), without gradient
        lambda ~ Beta(alpha, alpha) for each sample;  partner: a random permutation of the batch
        y = (x - mu) / sig * (lambda sig + (1 - lambda) sig_partner) + lambda mu + (1 - lambda) mu_partner

    Args:
        p: probability of mixing, drawn for each batch and place; 0 disables it.
        alpha: parameter of the Beta distribution of lambda.
        after: auto (stages 1 to 3 of a ResNet, otherwise the first convolutions), a module, or a list of modules or name patterns.

    Reference:
        K. Zhou et al. Domain Generalization with MixStyle. ICLR 2021.
    """
    if not 0 <= p <= 1 or alpha <= 0:
        raise OptionError(f"mixstyle: p must be between 0 and 1 and alpha must be positive, got p={p}, alpha={alpha}.")
    if not after or not isinstance(after, str | tuple | list) or not all(isinstance(name, str) and name for name in after):
        raise OptionError(f'mixstyle: after must be auto, a module, or a list such as ("layer1", "layer2"), got {after!r}.')
    surgery = (InsertMixStyle(after, p, alpha),) if p else ()
    return Method(
        "mixstyle", surgery=surgery, standalone=False, facts=Facts(extra_work="one mixing per place and step" if p else "")
    )
