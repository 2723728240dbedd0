"""Declarations of data sets that are read from files.

Each file of ``polyfed/data/sets`` declares a data set as a ``Declaration``: its facts, and how its files are found and read.
``registered`` makes the function that users call from it, such as ``pacs(root="~/data", size=32)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from polyfed.core.data_types import DataSet, Domain, TrainsWith
from polyfed.data.augment import pair_augmentation, preparation
from polyfed.data.registry import data_sets
from polyfed.data.store.archives import contents
from polyfed.data.store.domain_files import DomainSource, source_text
from polyfed.data.store.download import RemoteFile
from polyfed.data.store.splits import check_share
from polyfed.errors import DataError, OptionError
from polyfed.tasks.known import CLASSIFICATION
from polyfed.tasks.task import Task

SplitCounts: TypeAlias = Mapping[str, "int | tuple[int, ...]"]
"""Expected examples by split: a total, or one number per class. The split ``all`` counts every example once."""

PREPARATION_OPTIONS = ("augment", "normalise", "crop", "flip")
PER_DOMAIN = "per_domain"


@dataclass(frozen=True)
class DataOption:
    """An option of a data set.

    Attributes:
        default: Default value. Its type is the required type.
        text: Documentation.
        check: Raises an ``OptionError`` for an invalid value. Receives the name of the data set and the value.
        note: Returns the text that a value adds to the source line of tables, or an empty string.
    """

    name: str
    default: int | float | str | bool
    text: str
    choices: tuple[str, ...] = ()
    check: Callable[[str, Any], None] = lambda owner, value: None
    note: Callable[[Any], str] = lambda value: ""

    def require(self, owner: str, value: Any) -> None:
        """Reject an invalid value."""
        if self.choices and value not in self.choices:
            raise OptionError(f"{owner}: {self.name} must be {' or '.join(map(repr, self.choices))}, got {value!r}.")
        self.check(owner, value)


def _whole_option(name: str, default: int, text: str, minimum: int, note: Callable[[Any], str] = lambda value: "") -> DataOption:
    def check(owner: str, value: int) -> None:
        if value < minimum:
            raise OptionError(f"{owner}: {name} must be at least {minimum}, got {value}.")

    return DataOption(name, default, text, check=check, note=note)


def size_option(default: int, text: str) -> DataOption:
    return _whole_option("size", default, text, 1, lambda size: f"{size}x{size} pixels")


def height_option(default: int, text: str) -> DataOption:
    return _whole_option("height", default, text, 1, lambda height: f"{height} pixels high")


def share_option(name: str, default: float, text: str) -> DataOption:
    return DataOption(name, default, text, check=lambda owner, share: check_share(owner, name, share))


def validation_option(text: str) -> DataOption:
    """Return ``validation``, a fraction of the training examples."""
    return share_option("validation", 0.0, text)


def augment_option(default: str, text: str = "Augmentation of training batches.") -> DataOption:
    return DataOption("augment", default, text)


def normalise_option(default: str, text: str = "Normalisation.") -> DataOption:
    return DataOption("normalise", default, text)


def crop_options(crop: int) -> tuple[DataOption, DataOption]:
    """Return ``crop`` and ``flip``, which move training images together with their masks."""
    return (
        _whole_option("crop", crop, "Side of the random crops in training; 0: whole images.", 0),
        DataOption("flip", True, "Mirror training images and their masks with probability 0.5."),
    )


def per_domain_option(
    default: int, text: str, note: Callable[[Any], str] = lambda kept: f"at most {kept} training images per domain" if kept else ""
) -> DataOption:
    """Return ``per_domain``, the number of training images per domain; 0 means all."""
    return _whole_option(PER_DOMAIN, default, text, 0, note)


_PER_DOMAIN_OPTION = per_domain_option(
    0, "Training images kept per domain, drawn with seed 0; 0 means all. Validation and test images are not affected."
)


def _fewer(domain: Domain, kept: int) -> Domain:
    """Keep a random subset of the training images. Smaller subsets are contained in larger ones."""
    count = len(domain.train)
    if not 0 < kept < count:
        return domain
    places = torch.from_numpy(np.sort(np.random.default_rng([0, count]).permutation(count)[:kept]))
    groups = None if domain.groups is None else domain.groups[places]
    return replace(domain, train=domain.train.subset(places), groups=groups)


@dataclass(frozen=True)
class Declaration:
    """Facts about a data set, and how its files are found.

    Attributes:
        about: Documentation without the options: a one-line summary and optional details.
        classes: Class names, in label order.
        splits: Origin of the train, validation and test splits.
        expected: Number of examples by layout and domain.
        find: ``find(root, **options)`` returns the domains below a folder, or an empty sequence. It receives all options except
            ``augment`` and ``normalise``, and ``per_domain`` only if the declaration lists it.
        packed_sha256: sha256 of each packed file.
        options: Options besides the folder, in the order of the signature.
        normalisation: Normalisation, if there is no option ``normalise``.
        side: Side of the images, if there is no option ``size``.
        trains_with: Default learning rate, optimizer and batch size of runs, as in the paper.
        files: Files that can be downloaded.
        page: Where to download the files manually, or those that are not in ``files``, with instructions.
        class_names: Returns the class names found in a folder, if ``classes`` contains only numbers.
        check_with: Arguments of ``find`` for ``polyfed data check`` that select all data, split as published.
    """

    name: str
    about: str
    title: str
    domains: tuple[str, ...]
    classes: tuple[str, ...]
    splits: str
    terms: str
    citation: str
    layouts: tuple[str, ...]
    expected: Mapping[str, Mapping[str, SplitCounts]]
    default_model: str
    find: Callable[..., Sequence[DomainSource]]
    packed_sha256: Mapping[str, str] = field(default_factory=dict)
    options: tuple[DataOption, ...] = ()
    normalisation: str = "half"
    side: int = 32
    files: tuple[RemoteFile, ...] = ()
    page: str = ""
    class_names: Callable[[Path], tuple[str, ...]] | None = None
    check_with: Mapping[str, object] = field(default_factory=dict)
    task: Task = CLASSIFICATION
    trains_with: TrainsWith | None = None

    @property
    def all_options(self) -> tuple[DataOption, ...]:
        """The declared options and ``per_domain``."""
        if any(option.name == PER_DOMAIN for option in self.options):
            return self.options
        return (*self.options, _PER_DOMAIN_OPTION)

    def build(self, root: str, **values: Any) -> DataSet:
        """Return the data set in a folder, given a value for every option."""
        kept = 0 if self.all_options is self.options else values.setdefault(PER_DOMAIN, 0)
        prepared = preparation(values.get("normalise", self.normalisation), values.get("augment", "none"))
        declared = {option.name for option in self.options if option.name not in PREPARATION_OPTIONS}
        sources = self.sources(root, **{name: value for name, value in values.items() if name in declared})
        domains = tuple(_fewer(source.load(), kept) for source in sources)
        pairs = pair_augmentation(values.get("crop", 0), values.get("flip", False))
        prepared = replace(prepared, augment_pairs=pairs, middle_square=any(source.middle_square for source in sources))
        return DataSet(
            name=self.title,
            classes=self.classes if self.class_names is None else self.class_names(Path(root).expanduser()),
            domains=domains,
            preparation=prepared,
            default_model=self.default_model,
            task=self.task,
            trains_with=self.trains_with,
            source=source_text(sources, domains, *(option.note(values[option.name]) for option in self.all_options)),
        )

    def sources(self, root: str, **options: Any) -> Sequence[DomainSource]:
        """Return the domains below a folder, not loaded yet. Raise an error if there are none."""
        folder = Path(root).expanduser()
        found = self.find(folder, **options)
        if not found:
            raise self.not_found(folder)
        return found

    def sources_to_check(self, root: str) -> Sequence[DomainSource]:
        """Return all data below a folder, split as published."""
        defaults = {option.name: option.default for option in self.options if option.name not in PREPARATION_OPTIONS}
        return self.sources(root, **{**defaults, **self.check_with})

    def not_found(self, root: Path, missing: str = "") -> DataError:
        """Return an error that lists the supported layouts and the content of the folder."""
        layouts = "; ".join(f"({number}) {layout}" for number, layout in enumerate(self.layouts, 1))
        return DataError(
            f"{missing or self.title} was not found in {root}: {contents(root)}. {self.title} is read from: {layouts}."
        )


def registered(declaration: Declaration) -> Callable[..., DataSet]:
    """Register a data set, and return the function that builds it."""
    build = described_function(
        declaration.name,
        declaration.about,
        "Folder that contains the files.",
        declaration.all_options,
        declaration.build,
        declaration.find,
    )
    data_sets.add(build, declaration=declaration)
    return build


def described_function(
    name: str,
    about: str,
    root: str,
    options: Sequence[DataOption],
    build: Callable[..., DataSet],
    find: Callable[..., Any],
) -> Callable[..., DataSet]:
    """Return a function with the parameter ``root`` and the given options, including their documentation and checks.

    Args:
        name: Name of the function.
        about: Documentation without the parameters.
        root: Documentation of ``root``.
        options: The other parameters.
        build: Receives a value for every parameter.
        find: Function whose module the result reports as its module.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(each.name, kind, default=each.default, annotation=type(each.default)) for each in options]
    signature = inspect.Signature([inspect.Parameter("root", kind, annotation=str), *parameters], return_annotation=DataSet)

    def call(*positional: Any, **named: Any) -> DataSet:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        for option in options:
            option.require(name, bound.arguments[option.name])
        return build(**bound.arguments)

    call.__name__ = call.__qualname__ = name
    call.__module__ = find.__module__
    arguments = [f"root: {root}", *(f"{option.name}: {option.text}" for option in options)]
    call.__doc__ = "\n    ".join([f"{inspect.cleandoc(about)}\n\nArgs:", *arguments])
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
