"""The one way to declare a data set that is read from files.

A file of ``polyfed/data/sets`` says what is known of its data set, where its files may lie and how they are read, as one
``Declaration``; ``registered`` makes the function from it that users call: ``pacs(root="~/data", size=32)``.
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

OF_PREPARATION = ("augment", "normalise", "crop", "flip")
"""Options that decide how batches are prepared."""
PER_DOMAIN = "per_domain"


@dataclass(frozen=True)
class DataOption:
    """An option of a data set.

    Args:
        name: What users write.
        default: Its default; its type is the type that values must have.
        text: What it means, for the documentation.
        choices: The allowed values, if they are few.
        check: Raises an ``OptionError`` for an invalid value; gets the data set's name and the value.
        note: What a value adds to the source that tables state; empty for nothing.
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
            raise OptionError(f"{owner}: {self.name} is {value!r}; it must be {' or '.join(map(repr, self.choices))}.")
        self.check(owner, value)


def _side_option(name: str, default: int, text: str, note: Callable[[Any], str]) -> DataOption:
    def check(owner: str, side: int) -> None:
        if side < 1:
            raise OptionError(f"{owner}: {name} is {side}; it must be at least 1.")

    return DataOption(name, default, text, check=check, note=note)


def size_option(default: int, text: str) -> DataOption:
    """``size``: the side of the images."""
    return _side_option("size", default, text, lambda size: f"{size}x{size} pixels")


def height_option(default: int, text: str) -> DataOption:
    """``height``: the height of the images."""
    return _side_option("height", default, text, lambda height: f"{height} pixels high")


def share_option(name: str, default: float, text: str) -> DataOption:
    """A share of the examples."""
    return DataOption(name, default, text, check=lambda owner, share: check_share(owner, name, share))


def validation_option(text: str) -> DataOption:
    """``validation``: a share of the training examples, none by default."""
    return share_option("validation", 0.0, text)


def augment_option(default: str, text: str = "Augmentation of training batches.") -> DataOption:
    """``augment``: an augmentation by name."""
    return DataOption("augment", default, text)


def normalise_option(default: str, text: str = "Normalisation.") -> DataOption:
    """``normalise``: a normalisation by name."""
    return DataOption("normalise", default, text)


def crop_options(crop: int) -> tuple[DataOption, DataOption]:
    """``crop`` and ``flip``: random crops and flips of training batches, of image and mask together."""

    def check(owner: str, side: int) -> None:
        if side < 0:
            raise OptionError(f"{owner}: crop is {side}; it must be 0 (none) or larger.")

    return (
        DataOption("crop", crop, "Side of the random crops in training; 0: whole images.", check=check),
        DataOption("flip", True, "Mirror training images and their masks with a chance of one half."),
    )


def check_per_domain(owner: str, per_domain: int) -> None:
    """Reject a negative number of training images."""
    if per_domain < 0:
        raise OptionError(f"{owner}: per_domain is {per_domain}; it must be 0 (all) or larger.")


_PER_DOMAIN_OPTION = DataOption(
    PER_DOMAIN,
    0,
    "Training images kept of each domain, drawn with seed 0; 0 means all. Validation and test images stay.",
    check=check_per_domain,
    note=lambda kept: f"at most {kept} training images per domain" if kept else "",
)


def _fewer(domain: Domain, kept: int) -> Domain:
    """Return a domain with at most so many of its training images; fewer are some of more."""
    count = len(domain.train)
    if not 0 < kept < count:
        return domain
    places = torch.from_numpy(np.sort(np.random.default_rng([0, count]).permutation(count)[:kept]))
    groups = None if domain.groups is None else domain.groups[places]
    return replace(domain, train=domain.train.subset(places), groups=groups)


@dataclass(frozen=True)
class Declaration:
    """What is known of a data set, and how its files are found.

    Args:
        name: The name under which it is registered.
        about: Its documentation without the options: a sentence, perhaps a blank line and more.
        title: Its name in tables.
        domains: The domains, in order.
        classes: The classes, in the order of their labels.
        splits: Where train, validation and test come from.
        terms: The terms of use as the sources state them.
        citation: Whom to cite.
        layouts: The layouts it can be read from.
        expected: The numbers of examples by layout and domain.
        default_model: The model that runs take if none is named.
        find: ``find(root, **options)`` gives the domains under a folder, or nothing if there are none. It gets all options
            but ``augment`` and ``normalise``, and ``per_domain`` only if it declares that itself.
        packed_sha256: The sha256 of each packed file.
        options: What users can choose besides the folder, in the order of the signature.
        normalisation: The normalisation, where ``normalise`` is no option.
        side: The side of the images, where ``size`` is no option.
        task: What is learnt.
        trains_with: Learning rate, optimizer and batch size that runs use if none are given, as the paper has them.
        files: The files that can be downloaded.
        page: Where the files, or those that cannot be downloaded here, are had by hand, and what to do there.
        class_names: The classes as the files under a folder name them, where the declared ones are only numbers.
        check_with: Arguments of ``find`` for ``polyfed data check`` in the place of the defaults: all data, split as published.
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
    def cuts(self) -> bool:
        """Return True if ``per_domain`` is applied here, not by ``find``."""
        return all(option.name != PER_DOMAIN for option in self.options)

    @property
    def all_options(self) -> tuple[DataOption, ...]:
        """The declared options and ``per_domain``."""
        return (*self.options, _PER_DOMAIN_OPTION) if self.cuts else self.options

    def build(self, root: str, **chosen: Any) -> DataSet:
        """The data set in a folder, with a value for every option. Options are checked before files are looked for."""
        kept = chosen.pop(PER_DOMAIN, 0) if self.cuts else 0
        check_per_domain(self.name, kept)
        for option in self.options:
            option.require(self.name, chosen[option.name])
        prepared = preparation(chosen.get("normalise", self.normalisation), chosen.get("augment", "none"))
        sources = self.sources(root, **{name: value for name, value in chosen.items() if name not in OF_PREPARATION})
        domains = tuple(_fewer(source.load(), kept) for source in sources)
        pairs = pair_augmentation(chosen.get("crop", 0), chosen.get("flip", False))
        prepared = replace(prepared, augment_pairs=pairs, middle_square=any(source.middle_square for source in sources))
        return DataSet(
            name=self.title,
            classes=self.classes if self.class_names is None else self.class_names(Path(root).expanduser()),
            domains=domains,
            preparation=prepared,
            default_model=self.default_model,
            task=self.task,
            trains_with=self.trains_with,
            source=source_text(
                sources, domains, *(option.note({PER_DOMAIN: kept, **chosen}[option.name]) for option in self.all_options)
            ),
        )

    def sources(self, root: str, **options: Any) -> Sequence[DomainSource]:
        """The domains under a folder, not loaded yet; it is an error if there are none."""
        folder = Path(root).expanduser()
        found = self.find(folder, **options)
        if not found:
            raise self.not_found(folder)
        return found

    def sources_to_check(self, root: str) -> Sequence[DomainSource]:
        """All data under a folder, split as published."""
        defaults = {option.name: option.default for option in self.options if option.name not in OF_PREPARATION}
        return self.sources(root, **{**defaults, **self.check_with})

    def not_found(self, root: Path, lacking: str = "") -> DataError:
        """The error that says which layouts there are and what was found instead."""
        layouts = "; ".join(f"({number}) {layout}" for number, layout in enumerate(self.layouts, 1))
        wanted = lacking or self.title
        return DataError(f"{wanted} was not found in {root}: {contents(root)}. {self.title} is read from: {layouts}.")


def registered(declaration: Declaration) -> Callable[..., DataSet]:
    """Register a data set.

    Args:
        declaration: What is known of it.

    Returns:
        The function that builds it; assign it to the data set's name in the file that declares it.
    """
    build = described_function(
        declaration.name, declaration.about, "Folder of the files.", declaration.all_options, declaration.build, declaration.find
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
    """Return the function that users call: it has the parameter ``root`` and these options, with their documentation.

    Args:
        name: Its name.
        about: Its documentation without the parameters.
        root: What ``root`` means.
        options: The other parameters.
        build: Gets a value for every parameter.
        find: A function of the module that the result belongs to.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(each.name, kind, default=each.default, annotation=type(each.default)) for each in options]
    signature = inspect.Signature([inspect.Parameter("root", kind, annotation=str), *parameters], return_annotation=DataSet)

    def call(*positional: Any, **named: Any) -> DataSet:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        return build(**bound.arguments)

    call.__name__ = call.__qualname__ = name
    call.__module__ = find.__module__
    arguments = [f"root: {root}", *(f"{option.name}: {option.text}" for option in options)]
    call.__doc__ = "\n    ".join([f"{inspect.cleandoc(about)}\n\nArgs:", *arguments])
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
