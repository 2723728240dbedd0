"""Examples that share one large array and know which rows are theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.data_types import ArrayExamples, as_targets
from polyfed.errors import DataError


@dataclass(frozen=True, eq=False)
class RowExamples:
    """Rows of a shared array, usually a memory-mapped one. Taking subsets copies nothing; making a batch does.

    Args:
        x: All inputs.
        y: All labels.
        rows: The rows that belong to these examples, in order.
    """

    x: Tensor
    y: Tensor
    rows: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} inputs but {len(self.y)} labels: each input needs one label.")
        object.__setattr__(self, "rows", self.rows.to(torch.int64))

    @property
    def labels(self) -> Tensor:
        """All targets."""
        return as_targets(self.y[self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Raw inputs and labels at these positions."""
        rows = self.rows[indices]
        return self.x[rows], as_targets(self.y[rows])

    def subset(self, indices: Tensor) -> RowExamples:
        """The examples at these positions, in this order."""
        return RowExamples(self.x, self.y, self.rows[indices])

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets the rows that are meant, not the whole array behind them.
        return ArrayExamples, self.batch(slice(None))
