"""What all data sets on disk share: facts about them, parts found under a folder, and the way to a DataSet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data.archives import FileIdentity, contents
from polyfed.data.cache import Arrays, cached
from polyfed.data.federation import Domain
from polyfed.data.picked import PickedExamples
from polyfed.errors import DataError

Splits: TypeAlias = Mapping[str, NDArray[np.int64]]
"""Rows of a part by split: train, test, and perhaps validation."""

Counts: TypeAlias = Mapping[str, "int | tuple[int, ...]"]
"""Expected examples by split: a total, or one number per class. The split ``all`` counts every example once."""

NAMED_AT_MOST = 5


@dataclass(frozen=True)
class Part:
    """One domain as one layout holds it, not decoded yet.

    Args:
        domain: The domain's name.
        layout: The layout it was found in.
        recipe: Everything besides the files that decides the arrays.
        files: What the arrays are made from.
        read: Decodes now: ``x`` (n, 3, height, width), ``y`` (n,), perhaps ``group`` (n,) and ``kept`` (positions of the
            readable images); adds a sentence to its argument for each image that cannot be read.
        split: From these arrays to the rows of each split.
        problems: What is already known to be wrong, a sentence each.
        skip_unreadable: Leave unreadable images out instead of refusing the part.
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


@dataclass(frozen=True)
class Facts:
    """What is known of a data set, for messages, listings and checks.

    Args:
        title: Its name in tables.
        domains: The domains, in order.
        classes: The classes, in the order of their labels.
        splits: Where train, validation and test come from.
        terms: The terms of use as the sources state them.
        cite: Whom to cite.
        layouts: The layouts it can be read from.
        packed: The sha256 of each packed file.
        expected: The numbers of examples by layout and domain.
        find: The parts under a folder, with all training data.
    """

    title: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    splits: str
    terms: str
    cite: str
    layouts: tuple[str, ...]
    packed: Mapping[str, str]
    expected: Mapping[str, Mapping[str, Counts]]
    find: Callable[[Path], list[Part]]

    def nothing_in(self, root: Path, lacking: str = "") -> DataError:
        """The error that says which layouts there are and what was found instead."""
        layouts = "; ".join(f"({number}) {layout}" for number, layout in enumerate(self.layouts, 1))
        wanted = lacking or self.title
        return DataError(f"{wanted} was not found in {root}: {contents(root)}. {self.title} is read from: {layouts}.")


def domain_of(part: Part) -> Domain:
    """The part's domain, with its images memory-mapped."""
    arrays = part.arrays()
    splits = part.split(arrays)
    x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    picked = {
        split: PickedExamples(x, y, torch.from_numpy(rows)) for split, rows in splits.items() if len(rows) or split != "validation"
    }
    group = torch.from_numpy(arrays["group"])[picked["train"].rows] if "group" in arrays else None
    return Domain(part.domain, picked["train"], picked["test"], picked.get("validation"), group)


def domains_of(parts: Sequence[Part]) -> tuple[Domain, ...]:
    """The domains of all parts, in order."""
    return tuple(domain_of(part) for part in parts)


def source_of(parts: Sequence[Part], domains: Sequence[Domain], *notes: str) -> str:
    """Which layouts and how many examples were used, for every table."""
    by_layout: dict[str, list[str]] = {}
    for part, domain in zip(parts, domains, strict=True):
        validation = 0 if domain.validation is None else len(domain.validation)
        by_layout.setdefault(part.layout, []).append(f"{domain.name} {len(domain.train)}/{validation}/{len(domain.test)}")
    used = "; ".join(f"{layout}: {', '.join(sizes)}" for layout, sizes in by_layout.items())
    return "; ".join([f"{used} (train/validation/test)", *(note for note in notes if note)])


def some_of(sentences: Sequence[str]) -> str:
    """The first few sentences, and how many there are more."""
    more = len(sentences) - NAMED_AT_MOST
    return " ".join(sentences[:NAMED_AT_MOST]) + (f" And {more} more." if more > 0 else "")
