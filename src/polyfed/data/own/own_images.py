"""User-supplied images as a list of files with domain, class, group and split, shared by folders, tables, copies and masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.data_types import DataSet, Domain, PairAugmentation
from polyfed.data.augment import preparation
from polyfed.data.declaration import DataOption, described_function
from polyfed.data.formats.mask_files import Meaning, mask_files
from polyfed.data.registry import data_sets
from polyfed.data.store.archives import FileTree
from polyfed.data.store.cache import Arrays
from polyfed.data.store.deep_ranges import of_domain, range_arrays, read_option
from polyfed.data.store.domain_files import SKIPPED, DomainFiles, first_of, source_text
from polyfed.data.store.images import Resizer, decode_all
from polyfed.data.store.splits import Splits, check_share, grouped, stratified
from polyfed.errors import DataError, OptionError
from polyfed.settings import AUTO
from polyfed.tasks.known import CLASSIFICATION, MULTILABEL, REGRESSION
from polyfed.tasks.task import Task

SPLITS = ("train", "validation", "test")
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
}


@dataclass(frozen=True)
class OwnImage:
    """One image file.

    Attributes:
        label: Class of the image. If there is a ``target``, the label is only the stratum for random splits.
        group: Group (patient) of the image. All images of a group are in the same split. Empty if the image has no group.
        split: train, validation or test. Empty if polyfed chooses the split.
        target: Target other than a class: a row of 0 and 1, or a number.
        mask: Path of the mask. Empty if there is none.
    """

    name: str
    domain: str
    label: str
    group: str = ""
    split: str = ""
    target: tuple[float, ...] = ()
    mask: str = ""


@dataclass(frozen=True)
class OwnOptions:
    """Split and preparation of user-supplied images. For images with masks, ``size`` is a height and a width."""

    size: int | tuple[int, int] = 64
    test_share: float = 0.2
    validation_share: float = 0.1
    seed: int = 0
    skip_unreadable: bool = False
    augment: str = "none"
    normalise: str = "half"
    middle_square: bool = False
    deep_range: str = AUTO
    augment_pairs: PairAugmentation | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def check(self, owner: str) -> None:
        """Reject invalid values before any file is read."""
        check_share(owner, "test_share", self.test_share)
        check_share(owner, "validation_share", self.validation_share)
        if min(self.sides) < 1 or self.seed < 0 or self.test_share + self.validation_share >= 1:
            raise OptionError(
                f"{owner}: sizes must be at least 1, seed at least 0, and test_share + validation_share below 1; "
                f"got size {self.size}, seed {self.seed}, test_share {self.test_share} and validation_share {self.validation_share}."
            )
        preparation(self.normalise, self.augment)
        read_option(owner, self.deep_range)


DEEP_RANGE_TEXT = "Values that become black and white in images with more than 8 bits: auto (measured per domain), or BLACK..WHITE."
OPTION_TEXTS = {
    "size": "Side of the images.",
    "test_share": "Fraction of each domain used for testing, if the data has no test split.",
    "validation_share": "Fraction of each domain used for validation, if the data has no validation split.",
    "seed": "Seed of the split.",
    "skip_unreadable": "Skip unreadable images and report how many, instead of rejecting the data.",
    "augment": "Augmentation of training batches.",
    "normalise": "Normalisation.",
    "middle_square": "Crop each image to its middle square, instead of changing its aspect ratio.",
    "deep_range": DEEP_RANGE_TEXT,
}


def registered_own(
    name: str,
    about: str,
    root: str,
    find: Callable[..., OwnImages],
    before: Sequence[DataOption] = (),
    after: Sequence[DataOption] = (),
) -> Callable[..., DataSet]:
    """Register a reader of user-supplied images with the options of ``OwnOptions``, and the options ``before`` and ``after`` them."""

    def build(root: str, **values: Any) -> DataSet:
        options = OwnOptions(**{each: values.pop(each) for each in OPTION_TEXTS})
        options.check(name)
        return find(Path(root).expanduser(), **values).data_set(options)

    defaults = {field.name: field.default for field in fields(OwnOptions)}
    common = [DataOption(each, defaults[each], text) for each, text in OPTION_TEXTS.items()]  # type: ignore[arg-type]
    reader = described_function(name, about, root, [*before, *common, *after], build, find)
    data_sets.add(reader, find=find)
    return reader


@dataclass(frozen=True)
class OwnImages:
    """User-supplied images, not decoded yet.

    Attributes:
        tree: Folder of all images.
        images: Image files. The order within a class of a domain is kept.
        classes: All classes in label order. A domain may lack some.
        reader: Expression that reads such data, up to its first option, for error messages.
        outputs: Names of labels or outputs, if images do not have exactly one class.
        meaning: Class of each mask value, if there are masks.
    """

    root: Path
    name: str
    tree: FileTree
    layout: str
    images: Sequence[OwnImage]
    classes: tuple[str, ...]
    reader: str
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    task: Task = CLASSIFICATION
    outputs: tuple[str, ...] = ()
    meaning: Meaning | None = None

    def __post_init__(self) -> None:
        if self.task.class_labels and len(self.classes) < 2:
            raise DataError(f"{self.root} has only one class, {self.classes[0]}. Add images of at least one more class.")

    @cached_property
    def by_domain(self) -> Mapping[str, Sequence[OwnImage]]:
        """Images by domain, in class order."""
        found: dict[str, list[OwnImage]] = {}
        for image in sorted(self.images, key=lambda image: (image.domain, self._label_of[image.label])):
            found.setdefault(image.domain, []).append(image)
        return found

    @cached_property
    def _label_of(self) -> Mapping[str, int]:
        return {name: label for label, name in enumerate(self.classes)}

    def _source(self, domain: str, images: Sequence[OwnImage], options: OwnOptions) -> DomainFiles:
        fixed = of_domain(read_option(self.name, options.deep_range), domain)
        if self.meaning is not None:
            pairs = [(image.name, image.mask) for image in images]
            split = split_rows(options, self.facts(images))
            files = mask_files(domain, self.layout, self.tree, pairs, options.sides, self.meaning, lambda pairs: split, fixed)
            return replace(files, data=self.name, root=str(self.root.resolve()))
        return DomainFiles(
            domain=domain,
            layout=self.layout,
            recipe={
                "set": "own_images",
                "size": options.size,
                "square": options.middle_square,
                "deep": fixed,
                "rows": [(self._label_of[image.label], image.group, image.split) for image in images],
                "targets": [image.target for image in images],
            },
            files=self.tree.identity([image.name for image in images]),
            read=partial(self._read, images, Resizer(options.sides, options.middle_square, fixed)),
            split=partial(split_rows, options),
            skip_unreadable=options.skip_unreadable,
            data=self.name,
            root=str(self.root.resolve()),
            advice=f" To skip them, specify the data as: {self.reader}, skip_unreadable=True).",
        )

    def facts(self, images: Sequence[OwnImage]) -> Arrays:
        """Return labels, splits, groups and targets as arrays, as ``split_rows`` requires them."""
        arrays: Arrays = {
            "y": np.array([self._label_of[image.label] for image in images], np.int64),
            "place": np.array([SPLITS.index(image.split) if image.split else -1 for image in images]),
        }
        if any(image.group for image in images):
            # An image without a group forms a group of one.
            names = [image.group or f"\0{position}" for position, image in enumerate(images)]
            numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
            arrays["group"] = np.array([numbers[name] for name in names], np.int64)
        if self.task is MULTILABEL:
            arrays["target"] = np.array([image.target for image in images], np.bool_)
        elif self.task is REGRESSION:
            arrays["target"] = np.array([image.target[0] for image in images], np.float32)
        return arrays

    def _read(self, images: Sequence[OwnImage], resizer: Resizer, unreadable: list[str]) -> Arrays:
        names = [image.name for image in images]
        x, readable = decode_all(self.tree, names, resizer, unreadable)
        facts = {name: values[readable] for name, values in self.facts(images).items()}
        return {"x": x, "kept": readable, **facts, **range_arrays(resizer.ranges)}

    def data_set(self, options: OwnOptions) -> DataSet:
        """Decode the images, or load them from the cache, then split and check them."""
        sources = [self._source(domain, images, options) for domain, images in self.by_domain.items()]
        domains = tuple(source.load() for source in sources)
        if self.meaning is None:
            for domain in domains:
                self._require_usable(domain)
        prepared = preparation(options.normalise, options.augment)
        pixels = f"{options.sides[1]}x{options.sides[0]} pixels{' of the middle square' * options.middle_square}"
        skipped = self._skipped(sources) if options.skip_unreadable else ""
        return DataSet(
            name=self.name,
            classes=self.outputs or self.classes,
            domains=domains,
            preparation=replace(
                prepared,
                middle_square=options.middle_square,
                augment_pairs=options.augment_pairs,
                deep_ranges={domain.name: domain.deep_ranges for domain in domains if domain.deep_ranges},
            ),
            default_model=self.task.default_model,
            task=self.task,
            source=source_text(sources, domains, pixels, f"seed {options.seed}", skipped),
            notes=(*self.notes, *self.missing_classes(), *([f"{self.root}: {skipped}."] if "skipped" in skipped else [])),
        )

    def missing_classes(self) -> list[str]:
        """Return a notice that lists the classes without training images in each domain, if there are any."""
        found = []
        for domain, images in self.by_domain.items() if self.task.class_labels else ():
            trained = {image.label for image in images if image.split in ("", "train")}
            absent = [label for label in self.classes if label not in trained]
            if not trained:
                found.append(f"{domain} has no training images")
            elif absent:
                found.append(f"{domain} lacks {', '.join(absent)}")
        if not found:
            return []
        return [f"Some domains lack training images of some classes: {'; '.join(found)}. Scores cover only the classes tested."]

    def _require_usable(self, domain: Domain) -> None:
        """Reject a domain without test images, or without a readable image of one of its classes."""
        if self.task.class_labels:
            parts = [part for part in (domain.train, domain.validation, domain.test) if part is not None]
            readable = {label for part in parts for label in part.labels.tolist()}
            listed = {image.label for image in self.by_domain[domain.name]}
            lost = [name for label, name in enumerate(self.classes) if label not in readable and name in listed]
            if lost:
                raise DataError(
                    f"{self.root}: none of the {', '.join(lost)} images of the domain {domain.name} can be read. Replace them."
                )
        if not len(domain.test):
            raise DataError(f"{self.root}: the domain {domain.name} has no test images. Add images, or set test_share above 0.")

    def _skipped(self, sources: Sequence[DomainFiles]) -> str:
        names = []
        for source in sources:
            readable = set(source.arrays()["kept"].tolist())
            names += [image.name for position, image in enumerate(self.by_domain[source.domain]) if position not in readable]
        if not names:
            return "no unreadable image"
        return f"{len(names)} unreadable image{'s' if len(names) != 1 else ''}{SKIPPED}{first_of(names)}"


def split_rows(options: OwnOptions, arrays: Arrays) -> Splits:
    """Return the rows of each split: as specified for the images, otherwise drawn by class with whole groups together."""
    places = arrays["place"]
    if (places < 0).any():
        rest, test = _draw(arrays, np.arange(len(places)), options.test_share, options.seed)
        train, validation = _draw(arrays, rest, options.validation_share / (1 - options.test_share), options.seed)
        return {"train": train, "validation": validation, "test": test}
    train, validation, test = (np.flatnonzero(places == place) for place in range(len(SPLITS)))
    if not len(validation):
        train, validation = _draw(arrays, train, options.validation_share, options.seed)
    return {"train": train, "validation": validation, "test": test}


def _draw(arrays: Arrays, rows: NDArray[np.int64], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    labels = arrays["y"][rows]
    rest, part = grouped(labels, arrays["group"][rows], share, seed) if "group" in arrays else stratified(labels, share, seed)
    return np.sort(rows[rest]), rows[part]
