"""Images that do not fit into memory: each is decoded when it is first asked for, and kept on disk in a file of bounded size.

The file has a slot for each image, a second file their checksums. A slot is filled where its checksum fits the pixels and the image
file, so a changed file is decoded again, a run that was killed goes on where it was, and processes may fill it together. Slots are read with ``pread``, so a process holds no more than
its batch. Images beyond the bound have no slot and are decoded whenever they are asked for.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.data_types import Domain
from polyfed.data.store.archives import FileTree
from polyfed.data.store.cache import cache_folder, cache_key
from polyfed.data.store.domain_files import Counts, Duplicates, counts_by_class, picture_hash, some_of
from polyfed.data.store.images import decode
from polyfed.data.store.splits import Splits
from polyfed.errors import DataError

LIMIT_VARIABLE = "POLYFED_CACHE_GB"
USUAL_LIMIT_GB = 200.0
SHARE_OF_FREE_DISK = 0.8


@dataclass(frozen=True, eq=False)
class PixelStore:
    """The images of one domain at one size.

    Args:
        name: What the images are, for the names of the files.
        tree: Where the image files are.
        names: The files, in order.
        size: Side of the images.
        middle_square: Cut the middle square out of each, instead of changing the aspect ratio.
    """

    name: str
    tree: FileTree
    names: Sequence[str]
    size: int
    middle_square: bool = True
    _opened: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def bytes_each(self) -> int:
        """Bytes of an image."""
        return 3 * self.size * self.size

    @cached_property
    def path(self) -> Path:
        """The file of pixels."""
        recipe = {"set": self.name, "size": self.size, "square": self.middle_square, "names": list(self.names)}
        return cache_folder() / f"{cache_key({**recipe, 'tree': str(self.tree.path.resolve())}, [])}.pixels"

    @cached_property
    def slots(self) -> int:
        """How many images have a slot."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = self.path.stat().st_size if self.path.exists() else 0
            room = made + int(shutil.disk_usage(self.path.parent).free * SHARE_OF_FREE_DISK)
        except OSError as error:
            raise DataError(
                f"Decoded images cannot be stored in {self.path.parent}: {error}. Set POLYFED_CACHE to another folder."
            ) from error
        return min(len(self.names), min(room, cache_limit()) // self.bytes_each)

    def _files(self) -> tuple[int, NDArray[np.uint32]]:
        """The file of pixels and the checksums, opened once by each process."""
        if self._opened.get("process") != os.getpid():
            try:
                pixels = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
                sums_file = self.path.with_suffix(".crc32")
                sums = os.open(sums_file, os.O_RDWR | os.O_CREAT, 0o600)
                if os.fstat(sums).st_size < 4 * len(self.names):
                    os.ftruncate(sums, 4 * len(self.names))
                os.close(sums)
                table: NDArray[np.uint32] = np.memmap(sums_file, np.uint32, "r+", shape=(len(self.names),))
            except OSError as error:
                raise DataError(
                    f"Decoded images cannot be stored in {self.path.parent}: {error}. Set POLYFED_CACHE to another folder."
                ) from error
            self._opened.update(process=os.getpid(), pixels=pixels, sums=table)
        return self._opened["pixels"], self._opened["sums"]

    def rows(self, positions: Sequence[int]) -> Tensor:
        """These images as (n, 3, size, size)."""
        found = np.empty((len(positions), self.bytes_each), np.uint8)
        for place, position in enumerate(positions):
            found[place] = self._image(position)
        return torch.from_numpy(found.reshape(-1, 3, self.size, self.size))

    def _image(self, position: int) -> NDArray[np.uint8]:
        if position >= self.slots:
            return self.decoded(position)
        pixels, sums = self._files()
        if sums[position]:
            content = os.pread(pixels, self.bytes_each, position * self.bytes_each)
            if len(content) == self.bytes_each and self._checksum(content, position) == sums[position]:
                return np.frombuffer(content, np.uint8)
        image = self.decoded(position)
        try:
            os.pwrite(pixels, image.tobytes(), position * self.bytes_each)
        except OSError:
            return image  # a full disk makes the run slower, not wrong
        sums[position] = self._checksum(image.tobytes(), position)
        return image

    def _checksum(self, content: bytes, position: int) -> int:
        """A checksum of the pixels and of what tells their file from another; never 0, which means: not there yet."""
        identity = repr(self.tree.identity([self.names[position]])).encode()
        return zlib.crc32(content, zlib.crc32(identity)) or 1

    def decoded(self, position: int) -> NDArray[np.uint8]:
        """An image from its file, flat."""
        name = self.names[position]
        return decode(self.tree.read(name), name, self.size, self.middle_square).reshape(-1)

    def __reduce__(self) -> tuple[Any, ...]:
        return PixelStore, (self.name, self.tree, self.names, self.size, self.middle_square)


def cache_limit() -> int:
    """Bytes that the decoded images of one domain may take: POLYFED_CACHE_GB, else 200 GB."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        return int(float(text or USUAL_LIMIT_GB) * 10**9)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{LIMIT_VARIABLE} is {text!r}; it must be a number of gigabytes.") from error


@dataclass(frozen=True, eq=False)
class StoredExamples:
    """Images of one or more stores with their labels. Nothing is decoded before a batch is asked for."""

    stores: tuple[PixelStore, ...]
    which: Tensor
    positions: Tensor
    y: Tensor

    @property
    def labels(self) -> Tensor:
        """All labels, int64, shape (n,)."""
        return self.y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Raw inputs and labels at these positions."""
        which, positions = self.which[indices], self.positions[indices]
        if len(self.stores) == 1:
            return self.stores[0].rows(positions.tolist()), self.y[indices]
        parts = [self.stores[number].rows([position]) for number, position in zip(which.tolist(), positions.tolist(), strict=True)]
        return torch.cat(parts), self.y[indices]

    def subset(self, indices: Tensor) -> StoredExamples:
        """The examples at these positions, in this order."""
        return StoredExamples(self.stores, self.which[indices], self.positions[indices], self.y[indices])

    def joined_with(self, others: Sequence[Any]) -> StoredExamples | None:
        """These and others after them, still on disk; None if others are of another kind."""
        parts = [self, *others]
        if not all(isinstance(part, StoredExamples) for part in parts):
            return None
        stores = tuple(dict.fromkeys(store for part in parts for store in part.stores))
        numbers = [torch.tensor([stores.index(store) for store in part.stores])[part.which] for part in parts]
        return StoredExamples(
            stores, torch.cat(numbers), torch.cat([part.positions for part in parts]), torch.cat([part.y for part in parts])
        )


@dataclass(frozen=True)
class StreamedFiles:
    """One domain in one layout, too large to be decoded at once.

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

    def count(self, classes: int, unreadable: list[str], duplicates: Duplicates) -> Counts:
        """Decode everything again, past the cache; an image that cannot be read counts in no split."""
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
        duplicates.add(self.domain, splits, list(hashes.values()), [self.names[position] for position in hashes])
        return counts_by_class(self.labels[list(hashes)], splits, classes)
