"""What a check of own data found, be they folders of classes, tables, or images with masks."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class OwnCheckResult:
    """What a check of own images found.

    Args:
        name: The name of the data.
        root: The folder or table.
        classes: All classes.
        counts: Images of each class, by domain and split; ``all`` counts every readable one.
        by_class: Images of each class, by domain; of masks, images that show it.
        sizes: Width and height of images in their files, smallest and largest of each, and how many sizes there are.
        modes: How many images have which kind of file and pixels.
        notes: What is worth knowing, a sentence each.
        problems: What must be mended, a sentence each.
    """

    name: str
    root: str
    classes: tuple[str, ...]
    counts: Mapping[str, Mapping[str, tuple[int, ...]]]
    by_class: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, str]
    modes: Mapping[str, int]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def summary(self) -> str:
        """One sentence."""
        images = sum(sum(by["all"]) for by in self.counts.values())
        found = f"{images:,} images, {len(self.counts)} domain{'s' if len(self.counts) != 1 else ''}, {len(self.classes)} classes"
        if self.ok:
            return f"{self.root}: {found}, nothing wrong."
        return f"{self.root}: {found}, {len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}."


def kind_of(content: bytes) -> str:
    """The kind of an image file: JPEG, PNG, ..."""
    with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as image:
        return str(image.format)


def size_words(sizes: Counter[tuple[int, int]]) -> str:
    """The smallest and the largest width and height, and how many sizes there are."""
    widths, heights = zip(*sizes, strict=True)
    smallest, largest = f"{min(widths)}x{min(heights)}", f"{max(widths)}x{max(heights)}"
    return smallest if len(sizes) == 1 else f"{smallest} to {largest}, {len(sizes)} sizes"
