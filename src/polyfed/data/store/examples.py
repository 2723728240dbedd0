"""Examples that are not two tensors in memory: rows of a shared array, blank inputs, and inputs with other targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.core.data_types import ArrayExamples, Examples, as_targets
from polyfed.errors import DataError


@dataclass(frozen=True, eq=False)
class RowExamples:
    """Rows of a shared array, which is usually memory-mapped. A subset copies nothing; a batch copies its rows."""

    x: Tensor
    y: Tensor
    rows: Tensor

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"{len(self.x)} inputs but {len(self.y)} labels: each input needs one label.")
        object.__setattr__(self, "rows", self.rows.to(torch.int64))

    @property
    def labels(self) -> Tensor:
        return as_targets(self.y[self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = self.rows[indices]
        return self.x[rows], as_targets(self.y[rows])

    def subset(self, indices: Tensor) -> RowExamples:
        return RowExamples(self.x, self.y, self.rows[indices])

    def __reduce__(self) -> tuple[Any, ...]:
        # Send only these rows to another process, not the whole array.
        return ArrayExamples, self.batch(slice(None))


@dataclass(frozen=True, eq=False)
class Relabelled:
    """Examples with replaced targets."""

    inner: Examples
    y: Tensor

    @property
    def labels(self) -> Tensor:
        return self.y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.inner.batch(indices)[0], self.y[indices]

    def subset(self, indices: Tensor) -> Relabelled:
        return Relabelled(self.inner.subset(indices), self.y[indices])


def blank_examples(y: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> ArrayExamples:
    """Return examples whose inputs are all zero and share the memory of a single number."""
    return ArrayExamples(torch.zeros((), dtype=dtype).expand(len(y), *shape), y)
