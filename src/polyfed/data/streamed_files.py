"""The files of one domain that is too large to be decoded at once: a ``DomainSource`` whose images come from a ``PixelStore``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.data_types import Domain
from polyfed.data.archives import FileTree
from polyfed.data.domain_files import Examined, some_of
from polyfed.data.duplicates import picture_hash
from polyfed.data.pixel_store import PixelStore, StoredExamples
from polyfed.data.splits import Splits
from polyfed.errors import DataError


@dataclass(frozen=True)
class StreamedFiles:
    """One domain in one layout, not decoded.

    Args:
        domain: The domain's name.
        layout: The layout it was found in.
        data_set: The data set, for the cache.
        tree: Where the files are.
        names: The files, in order.
        labels: The label of each.
        splits: The rows of each split.
        size: Side of the images.
        problems: What is already known to be wrong, a sentence each.
        groups: The group (patient) of each image.
        middle_square: Cut the middle square out of each image before it is resized.
    """

    domain: str
    layout: str
    data_set: str
    tree: FileTree
    names: Sequence[str]
    labels: NDArray[np.int64]
    splits: Splits
    size: int
    problems: tuple[str, ...] = ()
    groups: NDArray[np.int64] | None = None
    middle_square: bool = True

    @property
    def store(self) -> PixelStore:
        """Where decoded images are kept."""
        return PixelStore(f"{self.data_set}/{self.domain}", self.tree, self.names, self.size, self.middle_square)

    def load(self) -> Domain:
        """The domain; its images are decoded when they are asked for."""
        if self.problems:
            raise DataError(some_of(self.problems))
        store, y = self.store, torch.from_numpy(self.labels)

        def examples(rows: NDArray[np.int64]) -> StoredExamples:
            positions = torch.from_numpy(np.asarray(rows, np.int64))
            return StoredExamples((store,), torch.zeros_like(positions), positions, y[positions])

        validation = self.splits.get("validation")
        groups = None if self.groups is None else torch.from_numpy(self.groups[self.splits["train"]])
        held_out = examples(validation) if validation is not None and len(validation) else None
        return Domain(self.domain, examples(self.splits["train"]), examples(self.splits["test"]), held_out, groups)

    def count(self, classes: int, unreadable: list[str]) -> dict[str, tuple[int, ...]]:
        """Examples of each class by split; every image is decoded."""
        return self.examined(unreadable).counts(classes)

    def examined(self, unreadable: list[str]) -> Examined:
        """Everything decoded again, past the cache; an image that cannot be read is named and counts in no split."""
        store = self.store
        hashes: dict[int, bytes] = {}
        for position in range(len(self.names)):
            try:
                hashes[position] = picture_hash(store.decoded(position))
            except DataError as error:
                unreadable.append(str(error))
        row_of = {position: row for row, position in enumerate(hashes)}
        splits = {
            split: np.array([row_of[int(row)] for row in rows if int(row) in row_of], np.int64)
            for split, rows in self.splits.items()
        }
        return Examined(self.labels[list(hashes)], list(hashes.values()), [self.names[position] for position in hashes], splits)
