"""Names of the entries of TinyNet."""

from __future__ import annotations

from polyfed.testing import TinyNet

PLAIN = set(TinyNet().state_dict())
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
AFFINE = ("weight", "bias")


def under(layer: str, *names: str) -> set[str]:
    """The entries of a layer with these last names."""
    return {f"{layer}.{name}" for name in names}
