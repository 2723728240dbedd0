"""Group norm instead of batch norm, on any model.

    per sample, channels in G groups: y = gamma * (x - mean_g) / sqrt(var_g + eps) + beta

Reference: Wu and He, Group Normalization, ECCV 2018; FedAvg+GN in FedWon Tables 5, 6 and A.2, FixBN C.2.

Differences: none known. ``groups`` is 32 as in FedWon A.2 (8 where there are fewer channels, the largest divisor where 32 does not divide);
FixBN uses 2. A list gives the number layer by layer, as FedWon Table 5 does: ``group_norm(groups=(32, 32, 64))``.
The affine starts at 1 and 0; trained batch-norm affine is not copied (no paper does).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from polyfed.core.method import Facts, Method, register
from polyfed.errors import OptionError
from polyfed.layers.norms import groups_for
from polyfed.layers.replace_modules import replace_batch_norms


@dataclass(frozen=True)
class ToGroupNorm:
    """Replace every batch norm by group norm."""

    groups: int | tuple[int, ...]
    stage = "norm"

    def __call__(self, model: nn.Module) -> nn.Module:
        count = 0

        def make(norm: nn.Module) -> nn.Module:
            nonlocal count
            channels = int(norm.num_features)  # type: ignore[arg-type]
            made = nn.GroupNorm(self.groups_of(count, channels), channels)
            count += 1
            return made

        model = replace_batch_norms(model, make, "group_norm")
        if isinstance(self.groups, tuple) and count != len(self.groups):
            raise OptionError(f"group_norm: {len(self.groups)} numbers of groups are given, but the model has {count} batch norms.")
        return model

    def groups_of(self, layer: int, channels: int) -> int:
        """The number of groups of one layer."""
        if isinstance(self.groups, int):
            return groups_for(channels, self.groups)
        wanted = self.groups[layer] if layer < len(self.groups) else 1
        if channels % wanted:
            raise OptionError(f"group_norm: {wanted} groups do not divide the {channels} channels of norm layer {layer + 1}.")
        return wanted


@register(shows=("groups",))
def group_norm(groups: int | tuple[int, ...] = 32) -> Method:
    """Replace batch norm by group norm.

    Args:
        groups: number of groups, or one number per layer.
    """
    numbers = groups if isinstance(groups, tuple) else (groups,)
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in numbers):
        raise OptionError(f"group_norm: groups takes whole numbers of at least 1, found {groups!r}.")
    return Method("group_norm", surgery=(ToGroupNorm(groups),), standalone=False, facts=Facts(batch_norm=True, smallest_batch=1))
