"""Norm swaps: group, layer, instance or no norm instead of batch norm. Differences from the paper: docs/methods, one page per method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from polyfed.core.method import Facts, Method, register
from polyfed.core.part import Part
from polyfed.errors import OptionError
from polyfed.models.layers.norms import InstanceNorm, groups_for
from polyfed.models.layers.surgery import add_missing_biases, replace_batch_norms


@dataclass(frozen=True)
class SwapNorm(Part):
    """Replace every batch norm by ``make(channels)``."""

    part: str
    make: Callable[[int], nn.Module]
    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        return replace_batch_norms(model, lambda norm: self.make(int(norm.num_features)), self.part)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ToGroupNorm(Part):
    """Replace every batch norm by group norm."""

    groups: int | tuple[int, ...]
    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        count = 0

        def make(channels: int) -> nn.Module:
            nonlocal count
            made = nn.GroupNorm(self._groups_of(count, channels), channels)
            count += 1
            return made

        model = SwapNorm("group_norm", make)(model)
        if isinstance(self.groups, tuple) and count != len(self.groups):
            raise OptionError(f"group_norm: groups has {len(self.groups)} numbers, but the model has {count} batch norms.")
        return model

    def _groups_of(self, layer: int, channels: int) -> int:
        if isinstance(self.groups, int):
            return groups_for(channels, self.groups)
        wanted = self.groups[layer] if layer < len(self.groups) else 1
        if channels % wanted:
            raise OptionError(f"group_norm: {wanted} groups do not divide the {channels} channels of norm layer {layer + 1}.")
        return wanted


@dataclass(frozen=True)
class DropNorm(Part):
    """Replace every batch norm by the identity."""

    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        model = SwapNorm("no_norm", lambda _: nn.Identity())(model)
        add_missing_biases(model)
        return model


def _swap(name: str, surgery: SwapNorm | ToGroupNorm | DropNorm) -> Method:
    return Method(name, surgery=(surgery,), standalone=False, facts=Facts(batch_norm=True, smallest_batch=1))


@register(shows=("groups",))
def group_norm(groups: int | tuple[int, ...] = 32) -> Method:
    """Replace batch norm by group norm.

        per sample, channels in G groups:    y = gamma_c * (x - mean_g) / sqrt(var_g + eps) + beta_c
        mean and biased variance over the channels of the group and all positions

    Args:
        groups: number of groups, or one number per layer.

    Reference:
        Y. Wu and K. He. Group Normalization. ECCV 2018. FedAvg+GN in FedWon (ICLR 2024) and FixBN (2023).
    """
    numbers = groups if isinstance(groups, tuple) else (groups,)
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers):
        raise OptionError(f"group_norm: groups must be integers of at least 1, got {groups!r}.")
    return _swap("group_norm", ToGroupNorm(groups))


def _one_group(channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels)


@register
def layer_norm() -> Method:
    """Replace batch norm by layer norm.

        per sample:    y = gamma_c * (x - mean) / sqrt(var + eps) + beta_c        mean and variance over all channels and positions

    Reference:
        J. L. Ba et al. Layer Normalization. 2016. FedAvg+LN in FedWon (ICLR 2024).
    """
    return _swap("layer_norm", SwapNorm("layer_norm", _one_group))


@register
def instance_norm() -> Method:
    """Replace batch norm by instance norm.

        per sample and channel:    y = gamma_c * (x - mean_c) / sqrt(var_c + eps) + beta_c        mean and variance over positions

    Reference:
        D. Ulyanov et al. Instance Normalization: The Missing Ingredient for Fast Stylization. 2016. FedAvg+IN in FixBN (2023),
        Table 5.
    """
    return _swap("instance_norm", SwapNorm("instance_norm", InstanceNorm))


@register
def no_norm() -> Method:
    """Remove batch norm.

        y = x        convolutions and linear layers without bias before a norm get a zero bias

    Reference:
        FedAvg without BN in W. Zhuang and L. Lyu. FedWon: Triumphing Multi-domain Federated Learning Without Normalization.
        ICLR 2024. Figure 3 and Tables 4, 12 and 18.
    """
    return _swap("no_norm", DropNorm())
