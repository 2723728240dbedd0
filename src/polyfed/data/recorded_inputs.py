"""What a run records of its inputs: their shape, and how they are normalised. A run that is opened again takes both from its record.

Weights may want other images than those a run was trained on: a later polyfed, or a later library, may read and normalise images in
another way. What was trained stays what it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.data_types import Federation
from polyfed.errors import DataError


@dataclass(frozen=True)
class RecordedInputs:
    """The shape of one raw input, and the mean and spread by which channels are normalised."""

    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, federation: Federation) -> RecordedInputs:
        """The inputs of a federation."""
        raw, _ = federation.clients[0].train.batch(slice(0, 1))
        prepared = federation.preparation
        return cls(tuple(raw.shape[1:]), tuple(map(float, prepared.mean)), tuple(map(float, prepared.std)))

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> RecordedInputs | None:
        """What a table says of inputs; None where it says nothing of them."""
        if not {"input_shape", "mean", "std"} <= values.keys():
            return None
        shape, mean, std = (values[name] for name in ("input_shape", "mean", "std"))
        return cls(tuple(map(int, shape)), tuple(map(float, mean)), tuple(map(float, std)))

    def as_plain(self) -> dict[str, Any]:
        """The inputs as plain values, by the names under which they are written down."""
        return {"input_shape": list(self.shape), "mean": list(self.mean), "std": list(self.std)}

    def put_into(self, federation: Federation) -> Federation:
        """The federation with inputs normalised as they were; inputs of another shape are refused."""
        found = RecordedInputs.of(federation).shape
        if found != self.shape:
            raise DataError(
                f"The run was trained on inputs of {shape_words(self.shape)}, and {federation.name} now has inputs of {shape_words(found)}. "
                "Give the run its own data again, or score it on other data, which are resized (polyfed evaluate RUN DATA)."
            )
        return dataclasses.replace(
            federation, preparation=dataclasses.replace(federation.preparation, mean=self.mean, std=self.std)
        )


def shape_words(shape: Sequence[int]) -> str:
    """A shape in words.

    >>> shape_words((3, 64, 64))
    '3x64x64'
    """
    return "x".join(map(str, shape))
