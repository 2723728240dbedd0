"""Checks the files of a data set against what is known of it: ``polyfed data check NAME --root DIR``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from polyfed.data.archives import sha256_of
from polyfed.data.declaration import Declaration
from polyfed.data.domain_files import DomainSource, Examinable
from polyfed.data.duplicates import Duplicates
from polyfed.data.registry import data_sets
from polyfed.errors import DataError


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Args:
        name: The data set.
        root: The folder.
        layouts: The layout each domain was read from.
        counts: Examples of each class, by domain and split.
        problems: A sentence for each problem.
        notes: What is worth knowing, a sentence each: images that are there twice, as they are in some published sets.
    """

    name: str
    root: str
    classes: tuple[str, ...]
    layouts: Mapping[str, str]
    counts: Mapping[str, Mapping[str, tuple[int, ...]]]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def summary(self) -> str:
        """One sentence."""
        domains = f"{len(self.counts)} domain{'s' if len(self.counts) != 1 else ''}"
        if self.ok:
            return f"{self.name} in {self.root}: {domains}, all as expected."
        return f"{self.name} in {self.root}: {len(self.problems)} problem{'s' if len(self.problems) != 1 else ''} in {domains}."


def check(name: str, root: str) -> CheckResult:
    """Compare all files of a data set with the expected counts and checksums; every image is decoded again.

    Args:
        name: A registered data set.
        root: The folder of its files.
    """
    record = data_sets.find(name)
    declaration = record.extra.get("declaration")
    if not isinstance(declaration, Declaration):
        raise DataError(f"{record.name} is not read from files, so there is nothing to check.")
    problems = _wrong_archives(declaration, Path(root).expanduser())
    sources: Sequence[DomainSource] = ()
    try:
        sources = declaration.sources_to_check(root)
    except DataError as error:
        if not problems:
            raise
        # A wrong archive is the reason why nothing is found in it.
        problems.append(str(error))
    counts: dict[str, dict[str, tuple[int, ...]]] = {}
    duplicates = Duplicates()
    for source in sources:
        problems += source.problems
        try:
            counts[source.domain] = _counted(source, len(declaration.classes), problems, duplicates)
        except DataError as error:
            problems.append(str(error))
        else:
            problems += _wrong_counts(source, counts[source.domain], declaration)
    layouts = {source.domain: source.layout for source in sources}
    problems += _missing_domains(declaration, layouts)
    notes = (*duplicates.leaks(), *duplicates.across_domains())
    return CheckResult(declaration.title, root, declaration.classes, layouts, counts, tuple(dict.fromkeys(problems)), notes)


def _counted(source: DomainSource, classes: int, problems: list[str], duplicates: Duplicates) -> dict[str, tuple[int, ...]]:
    """Examples of each class by split; images that can be compared are added to those that were seen."""
    if not isinstance(source, Examinable):
        return source.count(classes, problems)
    examined = source.examined(problems)
    for split, rows in examined.splits.items():
        for row in rows:
            duplicates.add(examined.hashes[row], source.domain, split, examined.names[row])
    return examined.counts(classes)


def _wrong_archives(declaration: Declaration, root: Path) -> list[str]:
    sentences = []
    for file, expected in declaration.packed_sha256.items():
        for path in dict.fromkeys((root / file, root / Path(file).name)):
            if path.is_file() and (found := sha256_of(path)) != expected:
                sentences.append(f"{path} is not the packed file of this name: its sha256 is {found}, expected {expected}.")
    return sentences


def _missing_domains(declaration: Declaration, layouts: Mapping[str, str]) -> list[str]:
    """A sentence for each domain that is expected in the layouts that were found, and of which there is nothing."""
    expected = dict.fromkeys(domain for layout in layouts.values() for domain in declaration.expected.get(layout, {}))
    return [f"{domain}: nothing of this domain was found." for domain in expected if domain not in layouts]


def _wrong_counts(source: DomainSource, found: Mapping[str, tuple[int, ...]], declaration: Declaration) -> list[str]:
    sentences = []
    classes = declaration.classes
    for split, expected in declaration.expected.get(source.layout, {}).get(source.domain, {}).items():
        counts = found.get(split, (0,) * len(classes))
        where = source.domain if split == "all" else f"{source.domain}, {split}"
        if isinstance(expected, int):
            if sum(counts) != expected:
                sentences.append(f"{where}: {sum(counts)} images, expected {expected}.")
            continue
        sentences += [
            f"{where}: {number} images of the class {label}, expected {wanted}."
            for label, number, wanted in zip(classes, counts, expected, strict=True)
            if number != wanted
        ]
        sentences += _swapped(where, classes, counts, expected)
    return sentences


def _swapped(where: str, classes: Sequence[str], found: Sequence[int], expected: Sequence[int]) -> list[str]:
    """Two classes with each other's number of images have probably changed places."""
    return [
        f"{where}: the classes {classes[one]} and {classes[other]} have each other's number of images; their folders look swapped."
        for one, other in combinations(range(len(classes)), 2)
        if found[one] != expected[one] and (found[one], found[other]) == (expected[other], expected[one])
    ]
