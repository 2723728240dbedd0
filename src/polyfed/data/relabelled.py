"""Examples with other targets than their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from polyfed.core.data_types import Examples


@dataclass(frozen=True, eq=False)
class Relabelled:
    """The inputs of some examples with other targets."""

    inner: Examples
    y: Tensor

    @property
    def labels(self) -> Tensor:
        """All targets."""
        return self.y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Raw inputs and targets at these positions."""
        return self.inner.batch(indices)[0], self.y[indices]

    def subset(self, indices: Tensor) -> Relabelled:
        """The examples at these positions, in this order."""
        return Relabelled(self.inner.subset(indices), self.y[indices])
