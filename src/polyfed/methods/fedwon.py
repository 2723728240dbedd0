"""FedWon: scaled weight standardisation instead of norms. Differences from the paper: docs/methods/fedwon.md."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from polyfed.core.entries import AFFINE, NORM_FAMILIES, STATISTIC, BatchNorm, layer_family
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.workbench import Workbench
from polyfed.errors import ModelError, OptionError, nearest
from polyfed.methods._shared import require_choice
from polyfed.models.layers.folding import absorb, convolution_before, scale_and_shift
from polyfed.models.layers.surgery import replace_modules
from polyfed.models.layers.ws_conv import KINDS, fold, is_plain, is_standardised, standardised, standardised_from

__all__ = ["RemoveNorms", "Standardise", "fedwon", "fold", "is_norm"]

FORMS: dict[str, dict[str, Any]] = {
    "listing": {},
    "equation": {"unbiased": False, "learn_gain": False, "floor": torch.finfo(torch.float32).tiny},
}
SLOW_START = (
    "fedwon starts slowly: with the paper's gamma=1, the initial scale of its last hidden layer is about a tenth of that with batch norm. "
    "fedwon(gamma=1.7139), NFNets' gain for ReLU, or a larger --lr starts faster (polyfed show fedwon)."
)
CHOICES = {"bias": ("on", "keep"), "init": ("xavier", "keep"), "norms": ("all", "batch"), "form": tuple(FORMS)}


def is_norm(module: nn.Module) -> bool:
    """Return True if a module normalises activations, by its type or by its declared entry kinds."""
    declared = getattr(module, "entry_kinds", {}).values()
    return layer_family(module) in NORM_FAMILIES or AFFINE in declared or STATISTIC in declared


def without_norm(norm: nn.Module) -> nn.Module:
    """Return what remains of a norm: nothing, or the layers inside it (timm's norms contain their activation)."""
    inside = list(norm.children())
    return nn.Sequential(*inside) if inside else nn.Identity()


@dataclass(frozen=True)
class Standardise(Part):
    """Replace every convolution by one with standardised weights."""

    bias: str = "on"
    init: str = "xavier"
    gamma: float = 1.0
    form: str = "listing"
    plain: tuple[str, ...] = ()
    stage = "convolution"

    def __call__(self, model: nn.Module) -> nn.Module:
        if not any(isinstance(module, tuple(KINDS)) for module in model.modules()):
            raise ModelError(f"fedwon: {type(model).__name__} has no convolution to standardise. Use a convolutional model.")
        spared = self.spared(model)
        if model not in spared and is_plain(model):
            return self.converted(model)
        replace_modules(model, lambda module: is_plain(module) and module not in spared, self.converted)
        return model

    def notice(self, bench: Workbench, clients: int) -> str:
        """Warn if new weights without NFNets' gain train slowly at first."""
        return SLOW_START if self.gamma == 1 and self.init == "xavier" else ""

    def spared(self, model: nn.Module) -> set[nn.Module]:
        """Return convolutions that stay plain: those that the user names, and those with one weight per filter."""
        paths = {path: module for path, module in model.named_modules() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
        spared: set[nn.Module] = {module for module in paths.values() if module.weight[0].numel() < 2}
        for pattern in self.plain:
            named = {module for path, module in paths.items() if fnmatchcase(path, pattern)}
            if not named:
                raise OptionError(
                    f"fedwon: plain names {pattern!r}, but {type(model).__name__} has no such convolution. {nearest(pattern, paths)}"
                )
            spared |= named
        return spared

    def converted(self, convolution: nn.Module, scale: torch.Tensor | float = 1.0, shift: torch.Tensor | None = None) -> nn.Module:
        """Return a standardised convolution with new weights, or with the old ones, including scale and shift of its norm."""
        assert isinstance(convolution, nn.modules.conv._ConvNd)
        form = {"gamma": self.gamma, **FORMS[self.form]}
        had = convolution.bias is not None
        if self.init == "xavier":
            return standardised(convolution, bias=had or self.bias == "on", **form)
        bias = convolution.bias if shift is None else shift
        if bias is None and self.bias == "on":
            bias = torch.zeros(convolution.out_channels, dtype=convolution.weight.dtype, device=convolution.weight.device)
        return standardised_from(convolution, scale, bias, **form)


@dataclass(frozen=True)
class RemoveNorms(Part):
    """Remove every norm. If weights are kept, fold each norm into the convolution before it."""

    norms: str
    standardise: Standardise
    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        if self.standardise.init == "keep":
            self.move_into_convolutions(model)
        replace_modules(model, self.wanted, without_norm)
        return model

    def wanted(self, module: nn.Module) -> bool:
        return isinstance(module, BatchNorm) if self.norms == "batch" else is_norm(module)

    def move_into_convolutions(self, model: nn.Module) -> None:
        """Fold the scale and shift of each batch norm into the convolution before it."""
        before = convolution_before(model, [module for module in model.modules() if self.wanted(module)], "fedwon")
        spared = self.standardise.spared(model)
        made: dict[nn.Module, nn.Module] = {}
        for norm, convolution in before.items():
            scale, shift = scale_and_shift(convolution, norm)
            if convolution in spared or is_standardised(convolution):
                absorb(convolution, scale, shift)
            else:
                made[convolution] = self.standardise.converted(convolution, scale, shift)
        replace_modules(model, lambda module: module in made, lambda module: made[module])


@register
def fedwon(
    bias: str = "on",
    init: str = "xavier",
    gamma: float = 1.0,
    norms: str = "all",
    form: str = "listing",
    plain: tuple[str, ...] = (),
) -> Method:
    """Remove every norm and standardise the weights of every convolution.

        W_hat_i = gamma · gain_i · (W_i − mean(W_i)) / sqrt(max(N · var(W_i), 1e-4))
        y       = conv(x, W_hat) + b

    var is unbiased, N = C_in / groups * kernel positions, and gain is learned, one number per output channel.

    Args:
        bias: on adds a bias to convolutions without one, keep does not.
        init: xavier starts from new weights; keep folds each batch norm into the convolution before it, with the model's weights.
        gamma: constant factor of every standardised weight; 1.7139 keeps variance through ReLU.
        norms: norms to remove: all (batch, group, instance, layer), or batch.
        form: listing (learned gain, unbiased variance, floor 1e-4), or equation (Eq. 3, without these).
        plain: paths of convolutions that stay plain, with * as a wildcard.

    Reference:
        W. Zhuang and L. Lyu. FedWon: Triumphing Multi-domain Federated Learning Without Normalization. ICLR 2024.
    """
    values = {"bias": bias, "init": init, "norms": norms, "form": form}
    for option, known in CHOICES.items():
        require_choice("fedwon", option, values[option], known)
    if gamma <= 0:
        raise OptionError(f"fedwon: gamma must be positive, got {gamma}.")
    if not isinstance(plain, tuple) or not all(isinstance(path, str) for path in plain):
        raise OptionError(f"fedwon: plain must be a list of convolution names, got {plain!r}.")
    if init == "keep" and form == "equation":
        raise OptionError("fedwon: init='keep' needs a learned gain to store the scale of the weights. Use form='listing'.")
    standardise = Standardise(bias, init, gamma, form, plain)
    return Method(
        "fedwon",
        surgery=(RemoveNorms(norms, standardise), standardise),
        facts=Facts(smallest_batch=1, extra_work="weights standardised each step; none after fold()"),
    )
