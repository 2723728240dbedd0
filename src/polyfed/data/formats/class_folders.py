"""Images that lie in ``<domain>/<class>/<file>``, in a folder or an archive."""

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
from polyfed.data.store.images import decode_all, is_image
from polyfed.data.store.splits import Splits, in_turn, stratified

SplitLists: TypeAlias = Mapping[str, Sequence[str]]
"""The files that published lists name, by the list's kind, each as ``tail`` gives it; empty without lists."""


def plain(name: str) -> str:
    """A folder's name without what people spell differently: case, hyphens, underscores, blanks."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def tail(name: str) -> str:
    """A path's last three parts, its folders in plain spelling."""
    parts = name.replace("\\", "/").split("/")
    return "/".join([*(plain(part) for part in parts[-3:-1]), parts[-1]])


@dataclass(frozen=True)
class ImageList:
    """The images of one domain with their labels, in order."""

    tree: FileTree
    names: tuple[str, ...]
    labels: NDArray[np.int64]

    def tails(self) -> list[str]:
        """Each file as ``domain/class/file``, its folders in plain spelling."""
        return [tail(name) for name in self.names]

    def read(self, size: int, unreadable: list[str]) -> Arrays:
        """Decode all images; those that cannot be read are named and left out."""
        x, readable = decode_all(self.tree, self.names, size, unreadable)
        return {"x": x, "y": self.labels[readable], "kept": readable}

    def rows(self, wanted: Sequence[str], arrays: Arrays) -> NDArray[np.int64]:
        """The rows of the decoded arrays that show these files, given as ``tails`` gives them."""
        tails = self.tails()
        by_tail = {tails[position]: row for row, position in enumerate(arrays["kept"])}
        return np.array([by_tail[name] for name in wanted if name in by_tail], np.int64)

    def missing(self, lists: SplitLists) -> list[str]:
        """A sentence for each file that lists name and that is not there."""
        there = set(self.tails())
        lacking = dict.fromkeys(name for names in lists.values() for name in names if name not in there)
        return [f"The split lists name {name}, which is missing in {self.tree.path}." for name in lacking]


@dataclass(frozen=True)
class ClassFolders:
    """Image files by domain and class, folders of a domain that are no class, and the layout in which all were found."""

    tree: FileTree
    files: Mapping[str, Mapping[str, list[str]]]
    unknown: Mapping[str, list[str]] = field(default_factory=dict)
    layout: str = ""

    def image_list(self, domain: str, classes: Sequence[str]) -> ImageList:
        """The images of a domain, class after class, each class sorted by name."""
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
        """The images of each domain, with what splits them.

        Args:
            classes: All classes, in the order of their labels.
            lists: The published lists of each domain.
            origins: Where the splits come from, with published lists and without, for the layout.
            data_set: The name of the data set, for the cache.
            size: Side of the images.
            split: From the images, the lists and the decoded arrays to the rows of each split.
            gaps: Classes that a domain is known to lack.
            other_folders: Whether folders of other classes may lie there too.
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
        """A sentence for each class of a domain without images, unless it is known to lack it, and each folder that is no class."""
        found = self.files.get(domain, {})
        lacking = [label for label in classes if not found.get(label) and label not in gaps]
        if len(lacking) == len(classes):
            return [f"{self.tree.path} holds no images of the domain {domain}."]
        where = f"{self.tree.path}: the domain {domain}"
        return [
            *(f"{where} has no images of the class {label}." for label in lacking),
            *(
                f"{where} has a folder {folder}, which is none of the classes {', '.join(classes)}."
                for folder in ([] if other_folders else self.unknown.get(domain, []))
            ),
        ]


def split_in_turn(share: float, with_test: bool, images: ImageList, lists: SplitLists, arrays: Arrays) -> Splits:
    """Split by the lists train and crossval, else by class with seed 0; what is not for training is validation and test in turn.

    Args:
        share: Without lists, the share that is not for training.
        with_test: False: all that is not for training is for validation, as the lists have it.
        images: The images.
        lists: The published lists.
        arrays: The decoded arrays.
    """
    if lists:
        train, held_out = (images.rows(lists[kind], arrays) for kind in ("train", "crossval"))
    else:
        train, held_out = stratified(arrays["y"], share, seed=0)
    return in_turn(arrays["y"], train) if with_test else {"train": train, "validation": held_out}


def class_folders(tree: FileTree, domains: Mapping[str, str], classes: Mapping[str, str]) -> ClassFolders | None:
    """The images of these domains and classes, or None if there is no image of any.

    Args:
        tree: Where to look.
        domains: The domain's name by the plain spelling of its folder.
        classes: The class's name by the plain spelling of its folder.
    """
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
    """The images of these domains and classes in the first layout under a folder that has any.

    Args:
        root: Where to look.
        layouts: The folders and archives of each layout, in the order in which they are tried.
        domains: The domain's name by the plain spelling of its folder.
        classes: The class's name by the plain spelling of its folder.
    """
    for layout, places in layouts.items():
        for tree in existing_trees(root, places):
            # Listing a large folder takes long, so one without any folder of a domain is passed over.
            if tree.path.is_dir() and not any(plain(entry.name) in domains for entry in tree.path.iterdir() if entry.is_dir()):
                continue
            found = class_folders(tree, domains, classes)
            if found is not None:
                return replace(found, layout=layout)
    return None
