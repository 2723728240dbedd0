"""Find the files of a domain, decode them once, cache the result, and split it."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.data_types import Domain
from polyfed.data.store.archives import FileIdentity
from polyfed.data.store.cache import Arrays, cached
from polyfed.data.store.deep_ranges import ranges_in
from polyfed.data.store.examples import RowExamples
from polyfed.data.store.splits import Splits
from polyfed.errors import DataError

NAMED_AT_MOST = 5
Counts = dict[str, tuple[int, ...]]
"""Examples of each class by split; ``all`` counts every example once."""


class DomainSource(Protocol):
    """A domain that was found and can be loaded. ``DomainFiles`` decodes it into arrays; other sources may stream it."""

    @property
    def domain(self) -> str:
        """Name of the domain."""

    @property
    def layout(self) -> str:
        """Layout of its files."""

    @property
    def problems(self) -> Sequence[str]:
        """Known problems, as error messages."""

    @property
    def middle_square(self) -> bool:
        """True if each image is cropped to its central square before it is resized."""

    def load(self) -> Domain:
        """Return the domain with its splits."""

    def count(self, classes: int, unreadable: list[str], duplicates: Duplicates) -> Counts:
        """Decode everything without the cache, count it, and add error messages and duplicates to the arguments."""


@dataclass(frozen=True)
class DomainFiles:
    """One domain in one layout, not decoded yet.

    Attributes:
        recipe: Everything that determines the arrays besides the files.
        files: Source files of the arrays.
        read: Decodes the images into ``x`` (n, 3, height, width) and ``y`` (n,), optionally with ``target`` (if the target is not
            ``y``), ``group`` (n,), the ranges of deep images, and ``kept`` (positions of readable images). Adds an error message to its argument for each
            unreadable image.
        split: Returns the rows of each split, given the arrays.
        advice: Advice about unreadable images, for the error message.
        names: Image names, if each image has a separate file.
        middle_square: True if each image is cropped to its central square before it is resized.
        pairs: True if ``y`` contains masks. Then no example can be skipped, and none has a single class.
        data: Name of the data, for the list of cached copies. Default: that in the recipe.
        root: Folder or table of the data. Default: the common parent folder.
    """

    domain: str
    layout: str
    recipe: Mapping[str, object]
    files: Sequence[FileIdentity]
    read: Callable[[list[str]], Arrays]
    split: Callable[[Arrays], Splits]
    problems: tuple[str, ...] = ()
    skip_unreadable: bool = False
    advice: str = ""
    names: Sequence[str] = ()
    middle_square: bool = False
    pairs: bool = False
    data: str = ""
    root: str = ""

    def load(self) -> Domain:
        """Return the domain, with memory-mapped images."""
        arrays = self.arrays()
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays.get("target", arrays["y"]))
        splits = {
            split: RowExamples(x, y, torch.from_numpy(rows))
            for split, rows in self.split(arrays).items()
            if len(rows) or split != "validation"
        }
        group = torch.from_numpy(arrays["group"])[splits["train"].rows] if "group" in arrays else None
        return Domain(self.domain, splits["train"], splits["test"], splits.get("validation"), group, ranges_in(arrays))

    def count(self, classes: int, unreadable: list[str], duplicates: Duplicates) -> Counts:
        """Decode everything without the cache and count it. Pairs are not compared, and unreadable pairs are counted too."""
        arrays = self.read(unreadable)
        splits = self.split(arrays)
        if self.pairs:
            return counts_by_class(np.zeros(len(arrays["y"]), np.int64), splits, 1)
        hashes = [pixel_hash(image) for image in arrays["x"]]
        kept = arrays.get("kept", np.arange(len(hashes)))
        names = [self.names[position] if self.names else f"image {position}" for position in kept]
        duplicates.add(self.domain, splits, hashes, names)
        return counts_by_class(arrays["y"], splits, classes)

    def arrays(self) -> Arrays:
        """Return the decoded arrays, from the cache if possible."""
        if self.problems:
            raise DataError(some_of(self.problems))
        recipe = {**self.recipe, "domain": self.domain, **({} if self.pairs else {"skip": self.skip_unreadable})}
        root = self.root or os.path.commonpath([os.path.dirname(path) for path, *_ in self.files] or ["/"])
        origin = {"data": self.data or str(self.recipe.get("set", "images with masks")), "domain": self.domain, "root": root}
        return cached(recipe, self.files, self._decode, origin)

    def _decode(self) -> Arrays:
        unreadable: list[str] = []
        arrays = self.read(unreadable)
        if unreadable and not self.skip_unreadable:
            count = f"{len(unreadable)} {'pair' if self.pairs else 'image'}{'s' * (len(unreadable) != 1)}"
            raise DataError(f"{self.domain}: {count} cannot be read. {some_of(unreadable)}{self.advice}")
        return arrays


def counts_by_class(labels: NDArray[np.int64], splits: Splits, classes: int) -> Counts:
    """Count the examples of each class in each split and in total."""
    rows_of = {"all": np.arange(len(labels)), **splits}
    return {split: tuple(np.bincount(labels[rows], minlength=classes).tolist()) for split, rows in rows_of.items()}


@dataclass
class Duplicates:
    """Domain, split and name of each image, by the hash of its pixels."""

    seen: dict[bytes, list[tuple[str, str, str]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, domain: str, splits: Splits, hashes: Sequence[bytes], names: Sequence[str]) -> None:
        """Add the images of a domain, given the hash and the name of each image."""
        for split, rows in splits.items():
            for row in rows:
                self.seen[hashes[row]].append((domain, split, names[row]))

    def leaks(self) -> list[str]:
        """Return a notice about images in more than one of train, validation and test, if there are any."""
        return self._notice("in more than one of train, validation and test", 1)

    def across_domains(self) -> list[str]:
        """Return a notice about images in more than one domain, if there are any."""
        return self._notice("in more than one domain", 0)

    def _notice(self, where: str, part: int) -> list[str]:
        found = [places for places in self.seen.values() if len({place[part] for place in places}) > 1]
        if not found:
            return []
        named = ["; ".join(f"{domain} {split} {name}" for domain, split, name in places) for places in found[:NAMED_AT_MOST]]
        more = f" And {len(found) - NAMED_AT_MOST} more." if len(found) > NAMED_AT_MOST else ""
        return [f"{len(found)} image{'s are' if len(found) > 1 else ' is'} {where}: {' | '.join(named)}.{more}"]


def pixel_hash(pixels: NDArray[Any]) -> bytes:
    """Return a hash of the pixels and the shape of an image."""
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).digest()[:16]


SKIPPED = " skipped: "
"""Separates the number of skipped images from their names at the end of a source line."""


def without_names(source: str) -> str:
    """Return a source line without file names.

    >>> without_names("folder: pen 140/20/40; 2 unreadable images skipped: a b.png, c.png")
    'folder: pen 140/20/40; 2 unreadable images skipped'
    """
    before, skipped, _ = source.partition(SKIPPED)
    return before + skipped.removesuffix(": ")


def source_text(sources: Sequence[DomainSource], domains: Sequence[Domain], *notes: str) -> str:
    """Return the source line of tables: layouts, number of examples, and notes."""
    by_layout: dict[str, list[str]] = {}
    for source, domain in zip(sources, domains, strict=True):
        validation = 0 if domain.validation is None else len(domain.validation)
        by_layout.setdefault(source.layout, []).append(f"{domain.name} {len(domain.train)}/{validation}/{len(domain.test)}")
    used = "; ".join(f"{layout}: {', '.join(sizes)}" for layout, sizes in by_layout.items())
    return "; ".join([f"{used} (train/validation/test)", *(note for note in notes if note)])


def some_of(messages: Sequence[str]) -> str:
    """Join the first messages, and state how many more there are."""
    more = len(messages) - NAMED_AT_MOST
    return " ".join(messages[:NAMED_AT_MOST]) + (f" And {more} more." if more > 0 else "")


def first_of(names: Sequence[str]) -> str:
    """List the first names, and state how many more there are."""
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
