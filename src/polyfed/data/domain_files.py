"""The files of one domain, and how they become a ``Domain``: found, decoded once, cached, split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.data_types import Domain
from polyfed.data.archives import FileIdentity
from polyfed.data.cache import Arrays, cached
from polyfed.data.duplicates import picture_hash
from polyfed.data.row_examples import RowExamples
from polyfed.data.splits import Splits
from polyfed.errors import DataError

NAMED_AT_MOST = 5


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
        """What is already known to be wrong, a sentence each."""

    @property
    def middle_square(self) -> bool:
        """Whether the middle square is cut out of each image before it is resized."""

    def load(self) -> Domain:
        """The domain with its splits."""

    def count(self, classes: int, unreadable: list[str]) -> dict[str, tuple[int, ...]]:
        """Examples of each class by split, read again from the files; ``all`` counts every example once."""


@dataclass(frozen=True)
class Examined:
    """A domain that was read again: the label and the hash of each image, what to call it, and the rows of each split."""

    labels: NDArray[np.int64]
    hashes: Sequence[bytes]
    names: Sequence[str]
    splits: Splits

    def counts(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Examples of each class by split; ``all`` counts every example once."""
        splits = {"all": np.arange(len(self.labels)), **self.splits}
        return {split: tuple(np.bincount(self.labels[rows], minlength=classes).tolist()) for split, rows in splits.items()}


@runtime_checkable
class Examinable(Protocol):
    """A source whose images a check can compare with each other."""

    def examined(self, unreadable: list[str]) -> Examined:
        """Everything read again from the files, past the cache."""


@dataclass(frozen=True)
class DomainFiles:
    """One domain in one layout, not decoded yet.

    Args:
        domain: The domain's name.
        layout: The layout it was found in.
        recipe: Everything besides the files that decides the arrays.
        files: What the arrays are made from.
        read: Decodes now: ``x`` (n, 3, height, width), ``y`` (n,), perhaps ``target`` (what is learnt, where that is not ``y``),
            ``group`` (n,) and ``kept`` (positions of the readable images); adds a sentence to its argument for each image that cannot be read.
        split: From these arrays to the rows of each split.
        problems: What is already known to be wrong, a sentence each.
        skip_unreadable: Leave unreadable images out instead of refusing the domain.
        advice: What to do about unreadable images, for the message.
        names: What to call the images, where each has a file of its own.
        middle_square: The middle square was cut out of each image before it was resized.
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

    def load(self) -> Domain:
        """The domain, with its images memory-mapped."""
        arrays = self.arrays()
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays.get("target", arrays["y"]))
        splits = {
            split: RowExamples(x, y, torch.from_numpy(rows))
            for split, rows in self.split(arrays).items()
            if len(rows) or split != "validation"
        }
        group = torch.from_numpy(arrays["group"])[splits["train"].rows] if "group" in arrays else None
        return Domain(self.domain, splits["train"], splits["test"], splits.get("validation"), group)

    def count(self, classes: int, unreadable: list[str]) -> dict[str, tuple[int, ...]]:
        """Examples of each class by split; every image is decoded again, past the cache."""
        return self.examined(unreadable).counts(classes)

    def examined(self, unreadable: list[str]) -> Examined:
        """Everything decoded again, past the cache."""
        arrays = self.read(unreadable)
        hashes = [picture_hash(image) for image in arrays["x"]]
        kept = arrays.get("kept", np.arange(len(hashes)))
        names = [self.names[position] if self.names else f"image {position}" for position in kept]
        return Examined(arrays["y"], hashes, names, self.split(arrays))

    def arrays(self) -> Arrays:
        """The decoded arrays, from the cache if they are there."""
        if self.problems:
            raise DataError(some_of(self.problems))
        return cached({**self.recipe, "domain": self.domain, "skip": self.skip_unreadable}, self.files, self._decoded)

    def _decoded(self) -> Arrays:
        unreadable: list[str] = []
        arrays = self.read(unreadable)
        if unreadable and not self.skip_unreadable:
            count = f"{len(unreadable)} image{'s' * (len(unreadable) != 1)}"
            raise DataError(f"{self.domain}: {count} cannot be read. {some_of(unreadable)}{self.advice}")
        return arrays


SKIPPED = " skipped: "
"""Between the number of images that were left out and their names, which stand at the end of a source."""


def without_names(source: str) -> str:
    """What a source says, without the names of files.

    >>> without_names("folder: pen 140/20/40; 2 unreadable images skipped: a b.png, c.png")
    'folder: pen 140/20/40; 2 unreadable images skipped'
    """
    told, skipped, _ = source.partition(SKIPPED)
    return told + skipped.removesuffix(": ")


def source_text(sources: Sequence[DomainSource], domains: Sequence[Domain], *notes: str) -> str:
    """Which layouts and how many examples were used, for every table."""
    by_layout: dict[str, list[str]] = {}
    for source, domain in zip(sources, domains, strict=True):
        validation = 0 if domain.validation is None else len(domain.validation)
        by_layout.setdefault(source.layout, []).append(f"{domain.name} {len(domain.train)}/{validation}/{len(domain.test)}")
    used = "; ".join(f"{layout}: {', '.join(sizes)}" for layout, sizes in by_layout.items())
    return "; ".join([f"{used} (train/validation/test)", *(note for note in notes if note)])


def some_of(sentences: Sequence[str]) -> str:
    """The first few sentences, and how many more there are."""
    more = len(sentences) - NAMED_AT_MOST
    return " ".join(sentences[:NAMED_AT_MOST]) + (f" And {more} more." if more > 0 else "")
