"""Norm swaps: group norm, layer norm, instance norm or no norm instead of batch norm, on any model.

    group_norm:      per sample, channels in G groups: y = gamma_c * (x - mean_g) / sqrt(var_g + eps) + beta_c
    layer_norm:      group norm with one group (FedWon A.2), not torch's ``LayerNorm``, whose affine is per element
    instance_norm:   group norm with one channel per group; undefined on maps of one position, which is an error that says so
    no_norm:         y = x; layers that had no bias because of batch norm get one of zeros

Reference: Wu and He, Group Normalization, ECCV 2018; Ba et al., Layer Normalization, 2016; Ulyanov et al., Instance Normalization, 2016. FedAvg+GN and
FedAvg+LN in FedWon Tables 5, 6 and A.2, FedAvg+GN and FedAvg+IN in FixBN C.2 and Table 5, "FedAvg w/o BN" in FedWon Figure 3 and Tables 4, 12, 18;
the last can diverge at large batches, which is its finding.

Differences from the papers: none known. ``groups`` is 32 as in FedWon A.2 (8 where there are fewer channels, the largest divisor where 32 does not divide); FixBN uses 2.
A list gives the number layer by layer, as FedWon Table 5 does: ``group_norm(groups=(32, 32, 64))``. The affine starts at 1 and 0; trained batch-norm
affine is not copied (no paper does).
"""

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
    """Replace every batch norm by what ``make`` makes of its number of channels."""

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
            raise OptionError(f"group_norm: {len(self.groups)} numbers of groups are given, but the model has {count} batch norms.")
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

    Args:
        groups: number of groups, or one number per layer.
    """
    numbers = groups if isinstance(groups, tuple) else (groups,)
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers):
        raise OptionError(f"group_norm: groups takes whole numbers of at least 1, found {groups!r}.")
    return _swap("group_norm", ToGroupNorm(groups))


def _one_group(channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels)


@register
def layer_norm() -> Method:
    """Replace batch norm by layer norm."""
    return _swap("layer_norm", SwapNorm("layer_norm", _one_group))


@register
def instance_norm() -> Method:
    """Replace batch norm by instance norm."""
    return _swap("instance_norm", SwapNorm("instance_norm", InstanceNorm))


@register
def no_norm() -> Method:
    """Take batch norm out."""
    return _swap("no_norm", DropNorm())
