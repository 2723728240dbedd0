"""The files of one domain, and how they become a ``Domain``: found, decoded once, cached, split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from polyfed.core.data_types import Domain
from polyfed.data.archives import FileIdentity
from polyfed.data.cache import Arrays, cached
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

    def load(self) -> Domain:
        """The domain with its splits."""

    def count(self, classes: int, unreadable: list[str]) -> dict[str, tuple[int, ...]]:
        """Examples of each class by split, read again from the files; ``all`` counts every example once."""


@dataclass(frozen=True)
class DomainFiles:
    """One domain in one layout, not decoded yet.

    Args:
        domain: The domain's name.
        layout: The layout it was found in.
        recipe: Everything besides the files that decides the arrays.
        files: What the arrays are made from.
        read: Decodes now: ``x`` (n, 3, height, width), ``y`` (n,), perhaps ``group`` (n,) and ``kept`` (positions of the
            readable images); adds a sentence to its argument for each image that cannot be read.
        split: From these arrays to the rows of each split.
        problems: What is already known to be wrong, a sentence each.
        skip_unreadable: Leave unreadable images out instead of refusing the domain.
        advice: What to do about unreadable images, for the message.
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

    def load(self) -> Domain:
        """The domain, with its images memory-mapped."""
        arrays = self.arrays()
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        splits = {
            split: RowExamples(x, y, torch.from_numpy(rows))
            for split, rows in self.split(arrays).items()
            if len(rows) or split != "validation"
        }
        group = torch.from_numpy(arrays["group"])[splits["train"].rows] if "group" in arrays else None
        return Domain(self.domain, splits["train"], splits["test"], splits.get("validation"), group)

    def count(self, classes: int, unreadable: list[str]) -> dict[str, tuple[int, ...]]:
        """Examples of each class by split; every image is decoded again, past the cache."""
        arrays = self.read(unreadable)
        labels = arrays["y"]
        splits = {"all": np.arange(len(labels)), **self.split(arrays)}
        return {split: tuple(np.bincount(labels[rows], minlength=classes).tolist()) for split, rows in splits.items()}

    def arrays(self) -> Arrays:
        """The decoded arrays, from the cache if they are there."""
        if self.problems:
            raise DataError(some_of(self.problems))
        return cached({**self.recipe, "domain": self.domain, "skip": self.skip_unreadable}, self.files, self._decoded)

    def _decoded(self) -> Arrays:
        unreadable: list[str] = []
        arrays = self.read(unreadable)
        if unreadable and not self.skip_unreadable:
            raise DataError(f"{self.domain}: {len(unreadable)} images cannot be read. {some_of(unreadable)}{self.advice}")
        return arrays


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
