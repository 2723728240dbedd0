"""Store images that do not fit into memory: decode each on first use, and keep it on disk in a file of bounded size.

The file has a slot for each image, and a second file has the checksums. A slot is valid if its checksum matches the pixels and the
identity of the image file. So changed files are decoded again, stopped runs resume without loss, and processes can fill the file
together. Slots are read with ``pread``, so that a process only needs memory for its batch. Images beyond the bound have no slot and are
decoded every time.
"""

from __future__ import annotations

import json
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
from polyfed.data.store.cache import cache_folder, cache_key, storage_error
from polyfed.data.store.domain_files import Counts, Duplicates, counts_by_class, pixel_hash, some_of
from polyfed.data.store.images import decode
from polyfed.data.store.splits import Splits
from polyfed.errors import DataError

LIMIT_VARIABLE = "POLYFED_CACHE_GB"
DEFAULT_LIMIT_GB = 200.0
FREE_DISK_FRACTION = 0.8


@dataclass(frozen=True, eq=False)
class PixelStore:
    """The images of one domain at one size. ``name`` identifies them in the cache."""

    name: str
    tree: FileTree
    names: Sequence[str]
    size: int
    middle_square: bool = True
    _opened: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def bytes_each(self) -> int:
        return 3 * self.size * self.size

    @cached_property
    def path(self) -> Path:
        recipe = {"set": self.name, "size": self.size, "square": self.middle_square, "names": list(self.names)}
        return cache_folder() / f"{cache_key({**recipe, 'tree': str(self.tree.path.resolve())}, [])}.pixels"

    @cached_property
    def slots(self) -> int:
        """Number of images that have a slot."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            used = self.path.stat().st_size if self.path.exists() else 0
            available = used + int(shutil.disk_usage(self.path.parent).free * FREE_DISK_FRACTION)
        except OSError as error:
            raise storage_error(self.path.parent, error) from error
        return min(len(self.names), min(available, cache_limit()) // self.bytes_each)

    def _files(self) -> tuple[int, NDArray[np.uint32]]:
        """Return the pixel file and the checksums, opened once per process."""
        if self._opened.get("process") != os.getpid():
            try:
                pixels = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
                sums_file = self.path.with_suffix(".crc32")
                sums = os.open(sums_file, os.O_RDWR | os.O_CREAT, 0o600)
                if os.fstat(sums).st_size < 4 * len(self.names):
                    os.ftruncate(sums, 4 * len(self.names))
                os.close(sums)
                data, _, domain = self.name.partition("/")
                origin = {"data": data, "domain": domain, "root": str(self.tree.path.resolve())}
                self.path.with_suffix(".json").write_text(json.dumps({"origin": origin}))
                table: NDArray[np.uint32] = np.memmap(sums_file, np.uint32, "r+", shape=(len(self.names),))
            except OSError as error:
                raise storage_error(self.path.parent, error) from error
            self._opened.update(process=os.getpid(), pixels=pixels, sums=table)
        return self._opened["pixels"], self._opened["sums"]

    def rows(self, positions: Sequence[int]) -> Tensor:
        """Return images as (n, 3, size, size)."""
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
            return image  # if the disk is full, the run is only slower
        sums[position] = self._checksum(image.tobytes(), position)
        return image

    def _checksum(self, content: bytes, position: int) -> int:
        """Return a checksum of the pixels and the identity of their file. Never 0, which marks an empty slot."""
        identity = repr(self.tree.identity([self.names[position]])).encode()
        return zlib.crc32(content, zlib.crc32(identity)) or 1

    def decoded(self, position: int) -> NDArray[np.uint8]:
        """Decode an image from its file, as a flat array."""
        name = self.names[position]
        return decode(self.tree.read(name), name, self.size, self.middle_square).reshape(-1)

    def __reduce__(self) -> tuple[Any, ...]:
        return PixelStore, (self.name, self.tree, self.names, self.size, self.middle_square)


def cache_limit() -> int:
    """Return the largest size in bytes of the decoded images of one domain: POLYFED_CACHE_GB, by default 200 GB."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        return int(float(text or DEFAULT_LIMIT_GB) * 10**9)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{LIMIT_VARIABLE} must be a number of gigabytes, got {text!r}.") from error


@dataclass(frozen=True, eq=False)
class StoredExamples:
    """Images of one or more stores with their labels. Images are decoded when a batch is read."""

    stores: tuple[PixelStore, ...]
    which: Tensor
    positions: Tensor
    y: Tensor

    @property
    def labels(self) -> Tensor:
        return self.y

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, indices: Tensor | slice) -> tuple[Tensor, Tensor]:
        which, positions = self.which[indices], self.positions[indices]
        if len(self.stores) == 1:
            return self.stores[0].rows(positions.tolist()), self.y[indices]
        parts = [self.stores[number].rows([position]) for number, position in zip(which.tolist(), positions.tolist(), strict=True)]
        return torch.cat(parts), self.y[indices]

    def subset(self, indices: Tensor) -> StoredExamples:
        return StoredExamples(self.stores, self.which[indices], self.positions[indices], self.y[indices])

    def joined_with(self, others: Sequence[Any]) -> StoredExamples | None:
        """Return these examples followed by others, still on disk, or None if the others are stored differently."""
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
    """One domain in one layout that is too large to be decoded at once. ``data_set`` identifies it in the cache."""

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
        return PixelStore(f"{self.data_set}/{self.domain}", self.tree, self.names, self.size, self.middle_square)

    def load(self) -> Domain:
        """Return the domain. Its images are decoded on first use."""
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
        """Decode everything without the cache and count it. Unreadable images are not counted in any split."""
        store = self.store
        hashes: dict[int, bytes] = {}
        for position in range(len(self.names)):
            try:
                hashes[position] = pixel_hash(store.decoded(position))
            except DataError as error:
                unreadable.append(str(error))
        row_of = {position: row for row, position in enumerate(hashes)}
        splits = {
            split: np.array([row_of[int(row)] for row in rows if int(row) in row_of], np.int64)
            for split, rows in self.splits.items()
        }
        duplicates.add(self.domain, splits, list(hashes.values()), [self.names[position] for position in hashes])
        return counts_by_class(self.labels[list(hashes)], splits, classes)
