"""Check user-supplied images, or the files of a known data set against their declaration (``polyfed data check``)."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from polyfed.data.declaration import Declaration
from polyfed.data.formats.mask_files import mask_image
from polyfed.data.own.own_data import own_images
from polyfed.data.own.own_images import OwnImage, OwnImages, OwnOptions, split_rows
from polyfed.data.registry import data_sets
from polyfed.data.store.archives import sha256_of
from polyfed.data.store.domain_files import DomainSource, Duplicates, counts_by_class, pixel_hash
from polyfed.data.store.images import comparable_pixels, decoded, opened
from polyfed.errors import DataError, SettingError
from polyfed.tasks.known import SEGMENTATION
from polyfed.tasks.segmentation import IGNORED

MASK_PROBLEMS_NAMED = 10
SHEET_IMAGES, SHEET_ROWS = 8, 200
THUMBNAIL, MARGIN, NAMES_WIDTH = 64, 4, 200


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    Attributes:
        root: Folder or table.
        counts: Images per class, by domain and split; ``all`` counts every readable image.
        by_class: User-supplied data only: images per class by domain; for masks, images that show the class.
        sizes: User-supplied data only: smallest and largest image size by domain, and the number of different sizes.
        modes: User-supplied data only: number of images by file format and colour mode.
        problems: Errors that must be fixed.
        layouts: Known data sets only: layout of each domain.
    """

    name: str
    root: str
    classes: tuple[str, ...]
    counts: Mapping[str, Mapping[str, tuple[int, ...]]]
    by_class: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    layouts: Mapping[str, str] | None = None

    @property
    def ok(self) -> bool:
        """Return True if there are no problems."""
        return not self.problems

    def summary(self) -> str:
        """Return a one-line summary."""
        domains = f"{len(self.counts)} domain{'s' * (len(self.counts) != 1)}"
        problems = f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}"
        if self.layouts is None:
            images = sum(sum(by["all"]) for by in self.counts.values())
            found = "no problems" if self.ok else problems
            return f"{self.root}: {images:,} images, {domains}, {len(self.classes)} classes, {found}."
        found = f"{domains}, all as expected" if self.ok else f"{problems} in {domains}"
        return f"{self.name} in {self.root}: {found}."


def check(data: str, root: str | None = None, sheet: Path | None = None) -> CheckResult:
    """Decode and count every image, and look for damaged and duplicated images.

    Args:
        data: A folder of images, with or without masks; a table that lists images, possibly in an expression such as
            ``manifest(root="scans.csv", group="patient")``; or a known data set, which is compared with its expected counts and checksums.
        root: Folder with the files of a known data set.
        sheet: Where to write a contact sheet of user-supplied images.
    """
    if root is None and (own := own_images(data)) is not None:
        inspection = _Inspection(*own)
        for domain in inspection.images.by_domain:
            inspection.add_domain(domain)
        if sheet is not None:
            _write_sheet(inspection.shown, sheet)
        return inspection.result(data)
    if root is None:
        raise DataError(
            f"{data} is not a folder or table of images. For a known data set (polyfed ls data), pass the folder of its files: --root DIR."
        )
    if sheet is not None:
        raise SettingError("--sheet works only with a folder or table of images: polyfed data check ./my_images --sheet FILE.")
    return _check_data_set(data, root)


def _check_data_set(name: str, root: str) -> CheckResult:
    record = data_sets.find(name)
    declaration = record.extra.get("declaration")
    if not isinstance(declaration, Declaration):
        raise DataError(f"{record.name} has no files to check.")
    problems = _wrong_archives(declaration, Path(root).expanduser())
    sources: Sequence[DomainSource] = ()
    try:
        sources = declaration.sources_to_check(root)
    except DataError as error:
        if not problems:
            raise
        # A wrong archive explains why nothing was found in it.
        problems.append(str(error))
    counts: dict[str, dict[str, tuple[int, ...]]] = {}
    duplicates = Duplicates()
    for source in sources:
        problems += source.problems
        try:
            counts[source.domain] = source.count(len(declaration.classes), problems, duplicates)
        except DataError as error:
            problems.append(str(error))
        else:
            problems += _wrong_counts(source, counts[source.domain], declaration)
    layouts = {source.domain: source.layout for source in sources}
    expected = dict.fromkeys(domain for layout in layouts.values() for domain in declaration.expected.get(layout, {}))
    problems += [f"{domain}: no files of this domain were found." for domain in expected if domain not in layouts]
    return CheckResult(
        name=declaration.title,
        root=root,
        classes=declaration.classes,
        counts=counts,
        notes=(*duplicates.leaks(), *duplicates.across_domains()),
        problems=tuple(dict.fromkeys(problems)),
        layouts=layouts,
    )


def _wrong_archives(declaration: Declaration, root: Path) -> list[str]:
    problems = []
    for file, expected in declaration.packed_sha256.items():
        for path in dict.fromkeys((root / file, root / Path(file).name)):
            if path.is_file() and (found := sha256_of(path)) != expected:
                problems.append(f"{path} has the wrong checksum: its sha256 is {found}, expected {expected}.")
    return problems


def _wrong_counts(source: DomainSource, found: Mapping[str, tuple[int, ...]], declaration: Declaration) -> list[str]:
    problems = []
    classes = declaration.classes
    for split, expected in declaration.expected.get(source.layout, {}).get(source.domain, {}).items():
        counts = found.get(split, (0,) * len(classes))
        where = source.domain if split == "all" else f"{source.domain}, {split}"
        if isinstance(expected, int):
            if sum(counts) != expected:
                problems.append(f"{where}: {sum(counts)} images, expected {expected}.")
            continue
        problems += [
            f"{where}: {number} images of the class {label}, expected {wanted}."
            for label, number, wanted in zip(classes, counts, expected, strict=True)
            if number != wanted
        ]
        problems += [
            f"{where}: the numbers of images of the classes {classes[one]} and {classes[other]} are exchanged. Their folders may be swapped."
            for one, other in combinations(range(len(classes)), 2)
            if counts[one] != expected[one] and (counts[one], counts[other]) == (expected[other], expected[one])
        ]
    return problems


class _Inspection:
    """Collects facts about user-supplied images."""

    def __init__(self, images: OwnImages, options: OwnOptions) -> None:
        self.images = images
        self.problems = list(images.problems)
        self.counts: dict[str, dict[str, tuple[int, ...]]] = {}
        self.sizes: dict[str, Counter[tuple[int, int]]] = {}
        self.modes: Counter[str] = Counter()
        self.duplicates = Duplicates()
        self.shown: dict[tuple[str, str], list[NDArray[np.uint8]]] = {}
        self.masks: _Masks | None = _Masks() if images.task is SEGMENTATION else None
        self.options = options if self.masks is None else OwnOptions(validation_share=0.0)

    def add_domain(self, domain: str) -> None:
        listed = self.images.by_domain[domain]
        hashes = {position: found for position, image in enumerate(listed) if (found := self._hash(image)) is not None}
        readable = list(hashes)
        arrays = {name: values[readable] for name, values in self.images.facts(listed).items()}
        splits = {
            split: rows
            for split, rows in split_rows(self.options, arrays).items()
            if len(rows) or split != "validation" or self.options.validation_share
        }
        self.counts[domain] = counts_by_class(arrays["y"], splits, len(self.images.classes))
        self.duplicates.add(domain, splits, list(hashes.values()), [listed[position].name for position in readable])
        if not len(splits["test"]):
            self.problems.append(f"The domain {domain} has no test images. Add images.")

    def _hash(self, image: OwnImage) -> bytes | None:
        """Return the hash of an image's pixels, or None if the image or its mask is unreadable."""
        tree = self.images.tree
        try:
            content = tree.read(image.name)
            pixels = decoded(content, image.name)
            mask = mask_image(tree.read(image.mask), image.mask) if image.mask else None
            self._show(image, content, mask)
        except DataError as error:
            self.problems.append(str(error))
            return None
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content)) as reopened:
            kind = str(reopened.format)
        self.modes[f"{kind} {pixels.mode}" if mask is None else f"{kind} with masks {mask.mode}"] += 1
        self.sizes.setdefault(image.domain, Counter())[pixels.size] += 1
        if mask is not None and self.masks is not None:
            if pixels.size != mask.size:
                self.problems.append(
                    f"{image.mask} has {mask.width}x{mask.height} pixels, but its image {image.name} has {pixels.width}x{pixels.height}."
                )
            self.masks.add(image, mask)
        return pixel_hash(comparable_pixels(pixels))

    def _show(self, image: OwnImage, content: bytes, mask: Image.Image | None) -> None:
        """Keep the first images of each class, or the first images with their masks, for the contact sheet."""
        shown = self.shown.setdefault((image.domain, image.label if mask is None else "images"), [])
        if len(shown) < SHEET_IMAGES:
            shown.append(np.asarray(opened(content, image.name)))
            if mask is not None:
                values = np.asarray(mask)
                # Steps of 37 give consecutive classes distinguishable shades; 255 stays white.
                shades = np.where(values == IGNORED, 255, values.astype(np.int64) * 37 % 251).astype(np.uint8)
                self.shown.setdefault((image.domain, "masks"), []).append(np.repeat(shades[..., None], 3, axis=2))

    def result(self, path: str) -> CheckResult:
        classes, notes = self.images.classes, [*self.images.notes, *self.images.missing_classes()]
        by_class = {domain: by["all"] for domain, by in self.counts.items()}
        if self.masks is not None:
            classes, by_class, found = self.masks.result(self.images.outputs, list(self.counts))
            self.problems += found
            unused = [name for place, name in enumerate(classes) if not any(by[place] for by in by_class.values())]
            notes += [f"No mask contains the class {', '.join(unused)}."] if unused else []
            more = len(self.problems) - MASK_PROBLEMS_NAMED
            if more > 0:
                self.problems[MASK_PROBLEMS_NAMED:] = [f"And {more} more problems of this kind."]
        return CheckResult(
            name=self.images.name,
            root=path,
            classes=classes,
            counts=self.counts,
            by_class=by_class,
            sizes={domain: _size_range(sizes) for domain, sizes in self.sizes.items()},
            modes=dict(self.modes.most_common()),
            notes=(*notes, *self.duplicates.across_domains()),
            problems=(*self.problems, *self.duplicates.leaks()),
        )


class _Masks:
    """Mask values, with the files that contain them and the number of masks per domain."""

    def __init__(self) -> None:
        self.files_with: dict[int, list[str]] = {}
        self.masks_with: dict[str, Counter[int]] = {}
        self.all_ignored: list[str] = []

    def add(self, image: OwnImage, mask: Image.Image) -> None:
        found = np.unique(np.asarray(mask)).tolist()
        if found == [IGNORED]:
            self.all_ignored.append(image.mask)
        for value in found:
            self.masks_with.setdefault(image.domain, Counter())[value] += 1
            self.files_with.setdefault(value, []).append(image.mask)

    def result(
        self, names: tuple[str, ...], domains: Sequence[str]
    ) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]], list[str]]:
        """Return the classes, the number of masks per domain that contain each class, and the problems found."""
        values, problems = set(self.files_with), []
        binary = values == {0, IGNORED}
        class_of = {0: 0, IGNORED: 1} if binary else {value: value for value in sorted(values - {IGNORED})}
        if not binary:
            problems += [f"{name} has no pixel with a class: all have the ignored value {IGNORED}." for name in self.all_ignored]
        names = names or tuple(str(label) for label in range(max(class_of.values(), default=0) + 1))
        for value, label in class_of.items():
            if label >= len(names):
                files = self.files_with[value]
                problems.append(
                    f"The mask value {value} has no class in classes.txt, which lists the classes 0 to {len(names) - 1}. "
                    f"{len(files)} file{'s' * (len(files) != 1)}: {', '.join(files[:3])}{' ...' if len(files) > 3 else ''}."
                )
        value_of = {label: value for value, label in class_of.items()}
        by_class = {
            domain: tuple(self.masks_with.get(domain, Counter())[value_of.get(label, -1)] for label in range(len(names)))
            for domain in domains
        }
        return names, by_class, problems


def _size_range(sizes: Counter[tuple[int, int]]) -> str:
    widths, heights = zip(*sizes, strict=True)
    smallest, largest = f"{min(widths)}x{min(heights)}", f"{max(widths)}x{max(heights)}"
    return smallest if len(sizes) == 1 else f"{smallest} to {largest}, {len(sizes)} sizes"


def _write_sheet(rows: Mapping[tuple[str, str], list[NDArray[np.uint8]]], file: Path) -> None:
    """Write a contact sheet with the first images of every class of every domain, to check the labels visually."""
    shown = list(rows.items())[:SHEET_ROWS]
    step = THUMBNAIL + MARGIN
    sheet = Image.new("RGB", (NAMES_WIDTH + SHEET_IMAGES * step, max(len(shown), 1) * step), "white")
    draw = ImageDraw.Draw(sheet)
    for line, ((domain, label), images) in enumerate(shown):
        draw.text((MARGIN, line * step + THUMBNAIL // 3), f"{domain[:30]}\n{label[:30]}", fill="black")
        for place, image in enumerate(images[:SHEET_IMAGES]):
            thumbnail = Image.fromarray(image).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
            sheet.paste(thumbnail, (NAMES_WIDTH + place * step, line * step + MARGIN // 2))
    try:
        sheet.save(file)
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot write the contact sheet to {file}: {error}. Pass a .png file in an existing folder.") from error
