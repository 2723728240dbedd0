"""Images of the user's own, as a list of files with domain, class, group and split: what folders, tables, copies and masks have in common."""

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
from polyfed.data.store.domain_files import SKIPPED, DomainFiles, first_of, source_text
from polyfed.data.store.images import decode_all
from polyfed.data.store.splits import Splits, check_share, grouped, stratified
from polyfed.errors import DataError, OptionError
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
"""What people call their splits."""


@dataclass(frozen=True)
class OwnImage:
    """One image file.

    Args:
        name: Its path below the folder of all images.
        domain: Where it comes from.
        label: Its class.
        group: Whom or what it shows (a patient); no split tears a group apart. Empty where it stands for itself.
        split: train, validation or test; empty where polyfed shall split.
        target: What is to be learnt of it, where that is not its class: a row of 0 and 1, or a number. Its label then says only of
            what a random split takes equal shares.
        mask: The path of its mask; empty if it has none.
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
    """How images of the user's own are split and prepared; the options of ``image_folder``, ``manifest`` and ``huggingface``.

    Images with masks have a height and a width as ``size``, and ``augment_pairs``.
    """

    size: int | tuple[int, int] = 64
    test_share: float = 0.2
    validation_share: float = 0.1
    seed: int = 0
    skip_unreadable: bool = False
    augment: str = "none"
    normalise: str = "half"
    middle_square: bool = False
    augment_pairs: PairAugmentation | None = None

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def check(self, owner: str) -> None:
        """Refuse values that cannot be used, before files are looked for."""
        check_share(owner, "test_share", self.test_share)
        check_share(owner, "validation_share", self.validation_share)
        if min(self.sides) < 1 or self.seed < 0 or self.test_share + self.validation_share >= 1:
            raise OptionError(
                f"{owner}: size is {self.size}, seed {self.seed} and the shares {self.test_share} and {self.validation_share}; "
                "the size must be at least 1, the seed 0 or larger, and the shares must leave something to train on."
            )
        preparation(self.normalise, self.augment)


OPTION_TEXTS = {
    "size": "Side of the images.",
    "test_share": "Share of each domain for testing, if the data has no test split.",
    "validation_share": "Share of each domain for validation, if the data has no validation split.",
    "seed": "Decides the split.",
    "skip_unreadable": "Skip unreadable images and report how many, instead of rejecting the data.",
    "augment": "Augmentation of training batches.",
    "normalise": "Normalisation.",
    "middle_square": "Cut the middle square out of each image, instead of changing its aspect ratio.",
}


def registered_own(
    name: str,
    about: str,
    root: str,
    find: Callable[..., OwnImages],
    before: Sequence[DataOption] = (),
    after: Sequence[DataOption] = (),
) -> Callable[..., DataSet]:
    """Register a way to read the user's own images, with the options of ``OwnOptions``.

    Args:
        name: The name of the function that users call.
        about: Its documentation without the parameters.
        root: What ``root`` means.
        find: Gets ``root`` as a path, and the options ``before`` and ``after``.
        before: Parameters that come before the common options.
        after: Parameters that come after them.
    """

    def build(root: str, **chosen: Any) -> DataSet:
        options = OwnOptions(**{each: chosen.pop(each) for each in OPTION_TEXTS})
        options.check(name)
        return find(Path(root).expanduser(), **chosen).data_set(options)

    defaults = {field.name: field.default for field in fields(OwnOptions)}
    common = [DataOption(each, defaults[each], text) for each, text in OPTION_TEXTS.items()]  # type: ignore[arg-type]
    made = described_function(name, about, root, [*before, *common, *after], build, find)
    data_sets.add(made)
    return made


@dataclass(frozen=True)
class OwnImages:
    """All images of the user's own, not decoded yet.

    Args:
        root: What the user named.
        name: The name of the data in tables.
        tree: The folder of all images.
        layout: The layout they were found in.
        images: The files; those of a class of a domain in the order wanted.
        classes: All classes, in the order of their labels; a domain may lack some.
        reader: How data of this kind is written with options, up to the first of them.
        notes: What users should know of the files, a sentence each.
        problems: What must be fixed before they can be used, a sentence each.
        task: What is learned.
        outputs: Names of labels or outputs, if images do not have one class each.
        meaning: The class of each value in the masks, if there are masks.
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
            raise DataError(f"{self.root} has one class only, {self.classes[0]}. Expected images of at least two classes.")

    @cached_property
    def by_domain(self) -> Mapping[str, Sequence[OwnImage]]:
        """The images of each domain, class after class."""
        place = {label: position for position, label in enumerate(self.classes)}
        found: dict[str, list[OwnImage]] = {}
        for image in sorted(self.images, key=lambda image: (image.domain, place[image.label])):
            found.setdefault(image.domain, []).append(image)
        return found

    def _source(self, domain: str, images: Sequence[OwnImage], options: OwnOptions) -> DomainFiles:
        """The files of a domain, with what splits them."""
        if self.meaning is not None:
            pairs = [(image.name, image.mask) for image in images]
            split = split_rows(options, self.facts(images))
            return mask_files(domain, self.layout, self.tree, pairs, options.sides, self.meaning, lambda pairs: split)
        return DomainFiles(
            domain=domain,
            layout=self.layout,
            recipe={
                "set": "own_images",
                "size": options.size,
                "square": options.middle_square,
                "rows": self.rows(images),
                "targets": [image.target for image in images],
            },
            files=self.tree.identity([image.name for image in images]),
            read=partial(self._read, images, options),
            split=partial(split_rows, options),
            skip_unreadable=options.skip_unreadable,
            advice=f" To leave them out, write the data as: {self.reader}, skip_unreadable=True).",
        )

    def rows(self, images: Sequence[OwnImage]) -> list[tuple[int, str, str]]:
        """Label, group and split of each image."""
        place = {label: position for position, label in enumerate(self.classes)}
        return [(place[image.label], image.group, image.split) for image in images]

    def facts(self, images: Sequence[OwnImage]) -> Arrays:
        """Labels, splits and groups as arrays: what ``split_rows`` needs."""
        labels, groups, splits = zip(*self.rows(images), strict=True)
        arrays: Arrays = {
            "y": np.array(labels, np.int64),
            "place": np.array([SPLITS.index(split) if split else -1 for split in splits]),
        }
        if any(groups):
            # An image without a group stands for itself.
            names = [group or f"\0{position}" for position, group in enumerate(groups)]
            numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
            arrays["group"] = np.array([numbers[name] for name in names], np.int64)
        if self.task is MULTILABEL:
            arrays["target"] = np.array([image.target for image in images], np.bool_)
        elif self.task is REGRESSION:
            arrays["target"] = np.array([image.target[0] for image in images], np.float32)
        return arrays

    def _read(self, images: Sequence[OwnImage], options: OwnOptions, unreadable: list[str]) -> Arrays:
        names = [image.name for image in images]
        x, readable = decode_all(self.tree, names, options.sides[0], unreadable, options.middle_square)
        return {"x": x, "kept": readable, **{name: values[readable] for name, values in self.facts(images).items()}}

    def data_set(self, options: OwnOptions) -> DataSet:
        """Decode (once), split and check."""
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
            preparation=replace(prepared, middle_square=options.middle_square, augment_pairs=options.augment_pairs),
            default_model=self.task.default_model,
            task=self.task,
            source=source_text(sources, domains, pixels, f"seed {options.seed}", skipped),
            notes=(*self.notes, *self.lacking(), *([f"{self.root}: {skipped}."] if "skipped" in skipped else [])),
        )

    def lacking(self) -> list[str]:
        """One sentence that names the classes that domains lack; nothing where each has all."""
        lines = []
        for domain, images in self.by_domain.items() if self.task.class_labels else ():
            absent = [
                label for label in self.classes if label not in {image.label for image in images if image.split in ("", "train")}
            ]
            if len(absent) == len(self.classes):
                lines.append(f"{domain} has no training images")
            elif absent:
                lines.append(f"{domain} lacks {', '.join(absent)}")
        return (
            [f"Not every domain has training images of every class: {'; '.join(lines)}. Scores are over the classes tested."]
            if lines
            else []
        )

    def _require_usable(self, domain: Domain) -> None:
        """Refuse a domain without test images, or one that lost a class with its unreadable images."""
        parts = [part for part in (domain.train, domain.validation, domain.test) if part is not None and self.task.class_labels]
        left = {label for part in parts for label in part.labels.tolist()}
        there = {image.label for image in self.by_domain[domain.name]}
        lost = [name for label, name in enumerate(self.classes) if label not in left and name in there]
        if lost and self.task.class_labels:
            raise DataError(
                f"{self.root}: no image of the class {', '.join(lost)} of the domain {domain.name} can be read. Replace them."
            )
        if not len(domain.test):
            raise DataError(
                f"{self.root}: the domain {domain.name} has no images for testing. Add images, or set test_share above 0."
            )

    def _skipped(self, sources: Sequence[DomainFiles]) -> str:
        """How many unreadable images were left out, and the first of them by name."""
        names = []
        for source in sources:
            readable = set(source.arrays()["kept"].tolist())
            names += [image.name for position, image in enumerate(self.by_domain[source.domain]) if position not in readable]
        if not names:
            return "no unreadable image"
        return f"{len(names)} unreadable image{'s' if len(names) != 1 else ''}{SKIPPED}{first_of(names)}"


def split_rows(options: OwnOptions, arrays: Arrays) -> Splits:
    """The rows of each split: as the images say, else drawn by class, whole groups together."""
    places = arrays["place"]
    if (places < 0).any():
        rest, test = _drawn(arrays, np.arange(len(places)), options.test_share, options.seed)
        train, validation = _drawn(arrays, rest, options.validation_share / (1 - options.test_share), options.seed)
        return {"train": train, "validation": validation, "test": test}
    train, validation, test = (np.flatnonzero(places == place) for place in range(len(SPLITS)))
    if not len(validation):
        train, validation = _drawn(arrays, train, options.validation_share, options.seed)
    return {"train": train, "validation": validation, "test": test}


def _drawn(arrays: Arrays, rows: NDArray[np.int64], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    labels = arrays["y"][rows]
    rest, part = grouped(labels, arrays["group"][rows], share, seed) if "group" in arrays else stratified(labels, share, seed)
    return np.sort(rows[rest]), rows[part]
