"""Checks images of the user's own: ``polyfed data check ./images``, or a table that lists them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyfed.data.check_masks import check_masks
from polyfed.data.contact_sheet import IN_A_ROW, write_sheet
from polyfed.data.duplicates import Duplicates, picture_hash
from polyfed.data.images import decoded, opened, own_pixels
from polyfed.data.own_check_result import OwnCheckResult, kind_of, size_words
from polyfed.data.own_data import own_images
from polyfed.data.own_images import OwnImage, OwnImages, OwnOptions, split_rows
from polyfed.data.sets.mask_folder import holds_masks
from polyfed.errors import DataError

USUAL = OwnOptions(skip_unreadable=True)
"""The splits that are looked at are those of a run without options."""


def check_own(path: str, sheet: Path | None = None) -> OwnCheckResult:
    """Decode every image, count, and look for images that are there twice.

    Args:
        path: A folder of images, one of images with masks, or a table that lists images.
        sheet: Where to write a contact sheet.
    """
    if holds_masks(path):
        return check_masks(path, sheet)
    look = Look(own_images(path))
    for domain in look.images.by_domain:
        look.at(domain)
    if sheet is not None:
        write_sheet(look.first, sheet)
    return look.result(path)


class Look:
    """What is gathered while images are looked at."""

    def __init__(self, images: OwnImages) -> None:
        self.images = images
        self.counts: dict[str, dict[str, tuple[int, ...]]] = {}
        self.sizes: dict[str, Counter[tuple[int, int]]] = {}
        self.modes: Counter[str] = Counter()
        self.duplicates = Duplicates()
        self.problems: list[str] = []
        self.first: dict[tuple[str, str], list[NDArray[np.uint8]]] = {}

    def at(self, domain: str) -> None:
        """Look at all images of a domain."""
        listed = self.images.by_domain[domain]
        hashes = {position: found for position, entry in enumerate(listed) if (found := self._hash(entry)) is not None}
        readable = list(hashes)
        arrays = {name: values[readable] for name, values in self.images.facts(listed).items()}
        splits = split_rows(USUAL, arrays)
        self.counts[domain] = {
            split: tuple(np.bincount(arrays["y"][rows], minlength=len(self.images.classes)).tolist())
            for split, rows in {"all": np.arange(len(readable)), **splits}.items()
        }
        for split, rows in splits.items():
            for row in rows:
                self.duplicates.add(hashes[readable[row]], domain, split, listed[readable[row]].name)
        if not len(splits["test"]):
            self.problems.append(f"The domain {domain} has no images for testing. Add images.")

    def _hash(self, entry: OwnImage) -> bytes | None:
        """The hash of an image's pixels; None if it cannot be read."""
        try:
            content = self.images.tree.read(entry.name)
            image = decoded(content, entry.name)
            first = self.first.setdefault((entry.domain, entry.label), [])
            if len(first) < IN_A_ROW:
                first.append(np.asarray(opened(content, entry.name)))
        except DataError as error:
            self.problems.append(str(error))
            return None
        self.modes[f"{kind_of(content)} {image.mode}"] += 1
        self.sizes.setdefault(entry.domain, Counter())[image.size] += 1
        return picture_hash(own_pixels(image))

    def result(self, path: str) -> OwnCheckResult:
        """What was found."""
        return OwnCheckResult(
            name=self.images.name,
            root=path,
            classes=self.images.classes,
            counts=self.counts,
            by_class={domain: by["all"] for domain, by in self.counts.items()},
            sizes={domain: size_words(sizes) for domain, sizes in self.sizes.items()},
            modes=dict(self.modes.most_common()),
            notes=(*self.images.notes, *self.images.lacking(), *self.duplicates.across_domains()),
            problems=(*self.problems, *self.duplicates.leaks()),
        )
