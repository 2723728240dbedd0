"""Split Office-Caltech-10 and DomainNet-10 by the lists and the protocol of the FedBN authors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from polyfed.data.declaration import DataOption
from polyfed.data.formats.class_folders import ClassFolders, ImageList, SplitLists, tail
from polyfed.data.formats.unpickle import read_pickle
from polyfed.data.store.cache import Arrays
from polyfed.data.store.splits import Splits, stratified, with_validation
from polyfed.errors import DataError, OptionError

ORIGINS = ("FedBN's lists", "stratified 80/20 with seed 0")
TEST_SHARE = 0.2
SplitRule: TypeAlias = Callable[[ImageList, SplitLists, Arrays], Splits]


def protocol_option(sizes: str) -> DataOption:
    """Return ``protocol``: all images, or the subset that FedBN uses."""
    return DataOption(
        "protocol",
        "all",
        f'"fedbn" ({sizes}) or "all" (the whole training order).',
        choices=("all", "fedbn"),
        note=lambda protocol: "FedBN's protocol" if protocol == "fedbn" else "",
    )


def check_fedbn(owner: str, protocol: str, validation: float) -> None:
    """Reject a validation fraction in combination with the protocol."""
    if protocol == "fedbn" and validation:
        raise OptionError(
            f"{owner}: validation has no effect with protocol='fedbn', which fixes the number of images. Remove the option."
        )


def fedbn_lists(root: Path, folders: Sequence[str], domain: str) -> dict[str, list[str]]:
    """Return the files in each of FedBN's lists as ``domain/class/file``, or nothing if there are no lists."""
    found = {}
    for kind in ("train", "test"):
        paths = [path for place in folders if (path := root / place / f"{domain.lower()}_{kind}.pkl").is_file()]
        if not paths:
            return {}
        content = read_pickle(paths[0])
        pair = content if isinstance(content, tuple | list) and len(content) == 2 else ((), ())
        names = [str(name) for name in pair[0]]
        if not names or not all("/" in name.replace("\\", "/") for name in names):
            raise DataError(f"{paths[0]} does not contain paths with their classes: expected a pair of lists.")
        found[kind] = [tail(name) for name in names]
    return found


def fedbn_split(
    folders: ClassFolders,
    classes: Sequence[str],
    lists: Mapping[str, SplitLists],
    shares: tuple[float, float],
    protocol: str,
    validation: float,
) -> SplitRule:
    """Return a rule that splits a domain by the lists, or 80/20 without lists.

    With protocol ``all``, the fraction ``validation`` from the end of the training order is for validation. Protocol ``fedbn`` keeps only
    both ends of the training order; ``shares`` has their sizes as fractions of the smallest training list.
    """
    smallest = min(_training_size(folders.image_list(domain, classes), named) for domain, named in lists.items())
    ends = (int(shares[0] * smallest), int(shares[1] * smallest)) if protocol == "fedbn" else None
    return partial(_split, ends, validation)


def _training_size(images: ImageList, lists: SplitLists) -> int:
    return len(lists["train"]) if lists else len(stratified(images.labels, TEST_SHARE, seed=0)[0])


def _split(ends: tuple[int, int] | None, validation: float, images: ImageList, lists: SplitLists, arrays: Arrays) -> Splits:
    if lists:
        train, test = (images.rows(lists[kind], arrays) for kind in ("train", "test"))
    else:
        train, test = stratified(arrays["y"], TEST_SHARE, seed=0)
    if ends is None:
        return with_validation(train, test, validation)
    return {"train": train[: ends[0]], "validation": train[len(train) - ends[1] :], "test": test}
