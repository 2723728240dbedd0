"""Find and read images stored as ``<domain>/<class>/<file>`` in a folder or an archive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from polyfed.data.store.archives import FileTree, existing_trees
from polyfed.data.store.cache import Arrays
from polyfed.data.store.domain_files import DomainFiles
from polyfed.data.store.images import Resizer, decode_all, is_image
from polyfed.data.store.splits import Splits, in_turn, stratified

SplitLists: TypeAlias = Mapping[str, Sequence[str]]
"""Files in the published lists, by kind of list, in the form of ``tail``. Empty if there are no lists."""


def plain(name: str) -> str:
    """Return a folder name without case, hyphens, underscores and spaces, which differ between copies."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def tail(name: str) -> str:
    """Return the last three parts of a path, with plain folder names."""
    parts = name.replace("\\", "/").split("/")
    return "/".join([*(plain(part) for part in parts[-3:-1]), parts[-1]])


@dataclass(frozen=True)
class ImageList:
    """The images of one domain with their labels."""

    tree: FileTree
    names: tuple[str, ...]
    labels: NDArray[np.int64]

    def tails(self) -> list[str]:
        """Return each file as ``domain/class/file``, with plain folder names."""
        return [tail(name) for name in self.names]

    def read(self, size: int, unreadable: list[str]) -> Arrays:
        """Decode all readable images."""
        x, readable = decode_all(self.tree, self.names, Resizer((size, size)), unreadable)
        return {"x": x, "y": self.labels[readable], "kept": readable}

    def rows(self, wanted: Sequence[str], arrays: Arrays) -> NDArray[np.int64]:
        """Return the rows of the decoded arrays for files in the form of ``tails``."""
        tails = self.tails()
        by_tail = {tails[position]: row for row, position in enumerate(arrays["kept"])}
        return np.array([by_tail[name] for name in wanted if name in by_tail], np.int64)

    def missing(self, lists: SplitLists) -> list[str]:
        """Return an error message for each missing file in the lists."""
        existing = set(self.tails())
        absent = dict.fromkeys(name for names in lists.values() for name in names if name not in existing)
        return [f"The split lists contain {name}, which is missing in {self.tree.path}." for name in absent]


@dataclass(frozen=True)
class ClassFolders:
    """Image files by domain and class, folders of a domain that are not classes, and the layout."""

    tree: FileTree
    files: Mapping[str, Mapping[str, list[str]]]
    unknown: Mapping[str, list[str]] = field(default_factory=dict)
    layout: str = ""

    def image_list(self, domain: str, classes: Sequence[str]) -> ImageList:
        """Return the images of a domain in class order, sorted by name within a class."""
        by_class = self.files.get(domain, {})
        names = [name for label in classes for name in by_class.get(label, [])]
        labels = [place for place, label in enumerate(classes) for _ in by_class.get(label, [])]
        return ImageList(self.tree, tuple(names), np.array(labels, np.int64))

    def domain_files(
        self,
        classes: Sequence[str],
        lists: Mapping[str, SplitLists],
        *,
        origins: tuple[str, str],
        data_set: str,
        size: int,
        split: Callable[[ImageList, SplitLists, Arrays], Splits],
        gaps: Mapping[str, Collection[str]] = MappingProxyType({}),
        other_folders: bool = False,
    ) -> list[DomainFiles]:
        """Return the files of each domain.

        ``split`` returns the rows of each split, given the images, the published lists and the decoded arrays. ``origins`` describes
        the splits with and without published lists, for the layout. ``gaps`` has the classes that a domain is known to lack.
        ``other_folders`` allows folders of other classes.
        """
        found = []
        for domain, named in lists.items():
            images = self.image_list(domain, classes)
            found.append(
                DomainFiles(
                    domain=domain,
                    layout=f"{self.layout}, {origins[0] if named else origins[1]}",
                    recipe={"set": data_set, "size": size},
                    files=images.tree.identity(images.names),
                    read=partial(images.read, size),
                    split=partial(split, images, named),
                    problems=(*self.problems(domain, classes, gaps.get(domain, ()), other_folders), *images.missing(named)),
                    names=images.names,
                )
            )
        return found

    def problems(self, domain: str, classes: Sequence[str], gaps: Collection[str] = (), other_folders: bool = False) -> list[str]:
        """Return an error message for each unexpected class without images, and for each folder that is not a class."""
        found = self.files.get(domain, {})
        absent = [label for label in classes if not found.get(label) and label not in gaps]
        if len(absent) == len(classes):
            return [f"{self.tree.path} has no images of the domain {domain}."]
        where = f"{self.tree.path}: the domain {domain}"
        return [
            *(f"{where} has no images of the class {label}." for label in absent),
            *(
                f"{where} has a folder {folder}, which is not one of the classes {', '.join(classes)}."
                for folder in ([] if other_folders else self.unknown.get(domain, []))
            ),
        ]


def split_in_turn(share: float, with_test: bool, images: ImageList, lists: SplitLists, arrays: Arrays) -> Splits:
    """Split by the lists train and crossval. Without lists, hold out the fraction ``share`` of each class, with seed 0.

    The images held out are assigned alternately to validation and test. If ``with_test`` is False, all are for validation.
    """
    if lists:
        train, held_out = (images.rows(lists[kind], arrays) for kind in ("train", "crossval"))
    else:
        train, held_out = stratified(arrays["y"], share, seed=0)
    return in_turn(arrays["y"], train) if with_test else {"train": train, "validation": held_out}


def class_folders(tree: FileTree, domains: Mapping[str, str], classes: Mapping[str, str]) -> ClassFolders | None:
    """Return the images of domains and classes given by their plain folder names, or None if there are none."""
    files: dict[str, dict[str, list[str]]] = {}
    unknown: dict[str, dict[str, None]] = {}
    for name in tree.names:
        parts = name.split("/")
        if len(parts) < 3 or not is_image(name) or plain(parts[-3]) not in domains:
            continue
        domain, label = domains[plain(parts[-3])], classes.get(plain(parts[-2]))
        if label is None:
            unknown.setdefault(domain, {})[parts[-2]] = None
        else:
            files.setdefault(domain, {}).setdefault(label, []).append(name)
    return ClassFolders(tree, files, {domain: list(folders) for domain, folders in unknown.items()}) if files else None


def find_class_folders(
    root: Path, layouts: Mapping[str, Sequence[str]], domains: Mapping[str, str], classes: Mapping[str, str]
) -> ClassFolders | None:
    """Return the images in the first layout that has any. ``layouts`` has the folders and archives of each layout."""
    for layout, places in layouts.items():
        for tree in existing_trees(root, places):
            # Listing a large folder takes long, so a folder without any domain folder is skipped.
            if tree.path.is_dir() and not any(plain(entry.name) in domains for entry in tree.path.iterdir() if entry.is_dir()):
                continue
            found = class_folders(tree, domains, classes)
            if found is not None:
                return replace(found, layout=layout)
    return None
