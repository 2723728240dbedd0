"""The files of one domain, and how they become a ``Domain``: found, decoded once, cached, split."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.data_types import Domain
from polyfed.data.store.archives import FileIdentity
from polyfed.data.store.cache import Arrays, cached
from polyfed.data.store.examples import RowExamples
from polyfed.data.store.splits import Splits
from polyfed.errors import DataError

NAMED_AT_MOST = 5
Counts = dict[str, tuple[int, ...]]
"""Examples of each class by split; ``all`` counts every example once."""


class DomainSource(Protocol):
    """One domain that was found and can be loaded. ``DomainFiles`` decodes into arrays; other sources may stream."""

    @property
    def domain(self) -> str:
        """The domain's name."""

    @property
    def layout(self) -> str:
        """The layout it was found in."""

    @property
    def problems(self) -> Sequence[str]:
        """Known problems, a sentence each."""

    @property
    def middle_square(self) -> bool:
        """Return True if the middle square is cut out of each image before it is resized."""

    def load(self) -> Domain:
        """Return the domain with its splits."""

    def count(self, classes: int, unreadable: list[str], duplicates: Duplicates) -> Counts:
        """Read everything again, past the cache: count it, name what cannot be read, and add each image to those that were seen."""


@dataclass(frozen=True)
class DomainFiles:
    """One domain in one layout, not decoded yet.

    Args:
        domain: The domain's name.
        layout: The layout it was found in.
        recipe: Everything besides the files that decides the arrays.
        files: What the arrays are made from.
        read: Decodes now: ``x`` (n, 3, height, width), ``y`` (n,), perhaps ``target`` (what is learned, if that is not ``y``),
            ``group`` (n,) and ``kept`` (positions of the readable images); adds a sentence to its argument for each image that cannot be read.
        split: From these arrays to the rows of each split.
        problems: Known problems, a sentence each.
        skip_unreadable: Skip unreadable images instead of rejecting the domain.
        advice: What to do about unreadable images, for the message.
        names: What to call the images, if each has its own file.
        middle_square: The middle square was cut out of each image before it was resized.
        pairs: Each example is an image with its mask, which is its ``y``. None can be skipped, and none has one class.
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

    def load(self) -> Domain:
        """Return the domain, with its images memory-mapped."""
        arrays = self.arrays()
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays.get("target", arrays["y"]))
        splits = {
            split: RowExamples(x, y, torch.from_numpy(rows))
            for split, rows in self.split(arrays).items()
            if len(rows) or split != "validation"
        }
        group = torch.from_numpy(arrays["group"])[splits["train"].rows] if "group" in arrays else None
        return Domain(self.domain, splits["train"], splits["test"], splits.get("validation"), group)

    def count(self, classes: int, unreadable: list[str], duplicates: Duplicates) -> Counts:
        """Decode everything again, past the cache. Pairs are counted only, an unreadable one too."""
        arrays = self.read(unreadable)
        splits = self.split(arrays)
        if self.pairs:
            return counts_by_class(np.zeros(len(arrays["y"]), np.int64), splits, 1)
        hashes = [picture_hash(image) for image in arrays["x"]]
        kept = arrays.get("kept", np.arange(len(hashes)))
        names = [self.names[position] if self.names else f"image {position}" for position in kept]
        duplicates.add(self.domain, splits, hashes, names)
        return counts_by_class(arrays["y"], splits, classes)

    def arrays(self) -> Arrays:
        """Return the decoded arrays, from the cache if they are there."""
        if self.problems:
            raise DataError(some_of(self.problems))
        recipe = {**self.recipe, "domain": self.domain, **({} if self.pairs else {"skip": self.skip_unreadable})}
        return cached(recipe, self.files, self._decoded)

    def _decoded(self) -> Arrays:
        unreadable: list[str] = []
        arrays = self.read(unreadable)
        if unreadable and not self.skip_unreadable:
            count = f"{len(unreadable)} {'pair' if self.pairs else 'image'}{'s' * (len(unreadable) != 1)}"
            raise DataError(f"{self.domain}: {count} cannot be read. {some_of(unreadable)}{self.advice}")
        return arrays


def counts_by_class(labels: NDArray[np.int64], splits: Splits, classes: int) -> Counts:
    """Count the examples of each class in each split, and in all."""
    rows_of = {"all": np.arange(len(labels)), **splits}
    return {split: tuple(np.bincount(labels[rows], minlength=classes).tolist()) for split, rows in rows_of.items()}


@dataclass
class Duplicates:
    """Where each image was seen, by a hash of its pixels: its domain, its split, and what to call it."""

    seen: dict[bytes, list[tuple[str, str, str]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, domain: str, splits: Splits, hashes: Sequence[bytes], names: Sequence[str]) -> None:
        """Add the images of a domain: the hash and the name of each, and the rows of each split."""
        for split, rows in splits.items():
            for row in rows:
                self.seen[hashes[row]].append((domain, split, names[row]))

    def leaks(self) -> list[str]:
        """Return a sentence about images that are in more than one of train, validation and test."""
        found = [places for places in self._several() if len({split for _, split, _ in places}) > 1]
        return _sentences("in more than one of train, validation and test", found)

    def across_domains(self) -> list[str]:
        """Return a sentence about images that two domains have."""
        found = [places for places in self._several() if len({domain for domain, _, _ in places}) > 1]
        return _sentences("in more than one domain", found)

    def _several(self) -> Iterator[list[tuple[str, str, str]]]:
        return (places for places in self.seen.values() if len(places) > 1)


def picture_hash(pixels: NDArray[Any]) -> bytes:
    """Return a hash of the pixels and the shape of an image."""
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).digest()[:16]


def _sentences(where: str, found: Sequence[Sequence[tuple[str, str, str]]]) -> list[str]:
    if not found:
        return []
    named = ["; ".join(f"{domain} {split} {name}" for domain, split, name in places) for places in found[:NAMED_AT_MOST]]
    more = f" And {len(found) - NAMED_AT_MOST} more." if len(found) > NAMED_AT_MOST else ""
    return [f"{len(found)} picture{'s are' if len(found) > 1 else ' is'} {where}: {' | '.join(named)}.{more}"]


SKIPPED = " skipped: "
"""Between the number of skipped images and their names, at the end of a source."""


def without_names(source: str) -> str:
    """Return a source without the names of files.

    >>> without_names("folder: pen 140/20/40; 2 unreadable images skipped: a b.png, c.png")
    'folder: pen 140/20/40; 2 unreadable images skipped'
    """
    told, skipped, _ = source.partition(SKIPPED)
    return told + skipped.removesuffix(": ")


def source_text(sources: Sequence[DomainSource], domains: Sequence[Domain], *notes: str) -> str:
    """Describe for every table which layouts and how many examples were used."""
    by_layout: dict[str, list[str]] = {}
    for source, domain in zip(sources, domains, strict=True):
        validation = 0 if domain.validation is None else len(domain.validation)
        by_layout.setdefault(source.layout, []).append(f"{domain.name} {len(domain.train)}/{validation}/{len(domain.test)}")
    used = "; ".join(f"{layout}: {', '.join(sizes)}" for layout, sizes in by_layout.items())
    return "; ".join([f"{used} (train/validation/test)", *(note for note in notes if note)])


def some_of(sentences: Sequence[str]) -> str:
    """Return the first few sentences, and how many more there are."""
    more = len(sentences) - NAMED_AT_MOST
    return " ".join(sentences[:NAMED_AT_MOST]) + (f" And {more} more." if more > 0 else "")


def first_of(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
