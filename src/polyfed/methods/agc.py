"""Adaptive gradient clipping. Differences from the paper: docs/methods/agc.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.core.client import Step
from polyfed.core.entries import HEAD
from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.core.workbench import Workbench
from polyfed.errors import OptionError
from polyfed.methods._shared import require_choice

UNITS = ("outputs", "inputs")


def unit_norms(x: Tensor, linear: str = "outputs") -> Tensor:
    """Return the norm of each unit, shaped to broadcast with ``x``."""
    axes: tuple[int, ...] | None = tuple(range(1, x.dim())) if x.dim() > 1 else None
    if x.dim() == 2 and linear == "inputs":
        axes = (0,)
    norms: Tensor = torch.linalg.vector_norm(x, dim=axes, keepdim=True)
    return norms


@torch.no_grad()
def clip_units(weight: Tensor, gradient: Tensor, clip: float, eps: float, linear: str = "outputs") -> None:
    largest = clip * unit_norms(weight, linear).clamp_min(eps)
    norms = unit_norms(gradient, linear)
    gradient.mul_(torch.where(norms > largest, largest / norms.clamp_min(torch.finfo(norms.dtype).tiny), 1.0))


@dataclass(frozen=True)
class AdaptiveClip(Part):
    """Clip each unit's gradient to a multiple of the unit's weight norm."""

    clip: float
    eps: float
    exclude: str
    linear: str
    stage = "clip"
    reads_data = False

    def __call__(self, step: Step) -> None:
        bench = step.client.bench
        for name, parameter in bench.parameters.items():
            spared = self.exclude == "head" and bench.plan.entries[name].kind == HEAD
            if parameter.grad is not None and not spared:
                clip_units(parameter, parameter.grad, self.clip, self.eps, self.linear)

    def check(self, bench: Workbench) -> None:
        if self.exclude == "head":
            bench.require_head("agc: exclude='head'")


@register(shows=("clip",))
def agc(clip: float = 1.28, eps: float = 1e-3, exclude: str = "nothing", linear: str = "outputs") -> Method:
    """Clip gradients unit by unit, relative to the weights.

        if ||G_i|| / max(||W_i||, eps) > clip:      G_i <- clip * max(||W_i||, eps) / ||G_i|| * G_i

    Args:
        clip: largest ratio of gradient norm to weight norm.
        eps: floor of the weight norm.
        exclude: nothing, or head.
        linear: unit of a linear layer's weight: outputs (rows), or inputs (columns).

    Reference:
        A. Brock et al. High-Performance Large-Scale Image Recognition Without Normalization. ICML 2021.
        W. Zhuang and L. Lyu. FedWon: Triumphing Multi-domain Federated Learning Without Normalization. ICLR 2024. Eq. 4.
    """
    if clip <= 0 or eps <= 0:
        raise OptionError(f"agc: clip and eps must be positive, got clip={clip}, eps={eps}.")
    require_choice("agc", "exclude", exclude, ("nothing", "head"))
    require_choice("agc", "linear", linear, UNITS)
    return Method(
        "agc",
        gradients=(AdaptiveClip(clip, eps, exclude, linear),),
        standalone=False,
        facts=Facts(extra_work="two norms per unit and step"),
    )
