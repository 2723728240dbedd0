"""Checks a folder of images with masks: ``polyfed data check ./scans`` where it holds ``images/`` and ``masks/``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyfed.core.tasks.segmentation import IGNORED
from polyfed.data.archives import FolderTree
from polyfed.data.contact_sheet import IN_A_ROW, write_sheet
from polyfed.data.duplicates import Duplicates, picture_hash
from polyfed.data.images import decoded, opened, own_pixels
from polyfed.data.mask_files import mask_image
from polyfed.data.own_check_result import OwnCheckResult, kind_of, size_words
from polyfed.data.sets.mask_folder import IMAGES, MASKS, USUAL_TEST_SHARE, by_share, class_names, files_by_domain
from polyfed.errors import DataError

NAMED_AT_MOST = 10


def check_masks(path: str, sheet: Path | None = None) -> OwnCheckResult:
    """Decode every image and its mask, count, and look for masks that cannot be those of their images.

    Args:
        path: A folder with ``images/`` and ``masks/``, itself or in each of its domains.
        sheet: Where to write a contact sheet: the first images of each domain, and below them their masks.
    """
    folder = Path(path).expanduser()
    look = LookAtMasks(folder)
    for domain, pairs in sorted(look.pairs.items()):
        look.at(domain, pairs)
    if sheet is not None:
        write_sheet(look.first, sheet)
    return look.result(path)


class LookAtMasks:
    """What is gathered while pairs are looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree = folder, FolderTree(folder)
        self.pairs, alone = files_by_domain(self.tree, folder)
        self.names = class_names(folder)
        self.problems = [f"{name} has nothing of its name in {MASKS if IMAGES in name.split('/') else IMAGES}/." for name in alone]
        self.counts: dict[str, dict[str, tuple[int, ...]]] = {}
        self.showing: dict[str, Counter[int]] = {}
        self.sizes: dict[str, Counter[tuple[int, int]]] = {}
        self.modes: Counter[str] = Counter()
        self.duplicates = Duplicates()
        self.first: dict[tuple[str, str], list[NDArray[np.uint8]]] = {}
        self.files_with: dict[int, list[str]] = {}
        self.white: list[str] = []

    def at(self, domain: str, pairs: Sequence[tuple[str, str]]) -> None:
        """Look at all pairs of a domain."""
        self.showing[domain], self.sizes[domain] = Counter(), Counter()
        hashes = {place: found for place, pair in enumerate(pairs) if (found := self._pair(domain, *pair)) is not None}
        readable = [pairs[place] for place in hashes]
        splits = by_share(USUAL_TEST_SHARE, 0.0, 0, readable)
        self.counts[domain] = {split: (len(rows),) for split, rows in {"all": np.arange(len(readable)), **splits}.items()}
        for split, rows in splits.items():
            for row in rows:
                self.duplicates.add(list(hashes.values())[row], domain, split, readable[row][0])
        if not len(splits["test"]):
            self.problems.append(f"The domain {domain} has no images for testing. Add images.")

    def _pair(self, domain: str, image_name: str, mask_name: str) -> bytes | None:
        """The hash of the image; None where it or its mask cannot be used."""
        try:
            content = self.tree.read(image_name)
            image, mask = decoded(content, image_name), mask_image(self.tree.read(mask_name), mask_name)
            self._show(domain, content, image_name, np.asarray(mask))
        except DataError as error:
            self.problems.append(str(error))
            return None
        self.modes[f"{kind_of(content)} with masks {mask.mode}"] += 1
        self.sizes[domain][image.size] += 1
        if image.size != mask.size:
            self.problems.append(
                f"{mask_name} is {mask.width}x{mask.height} pixels, its image {image_name} {image.width}x{image.height}."
            )
        found = np.unique(np.asarray(mask)).tolist()
        if found == [IGNORED]:
            self.white.append(mask_name)
        for value in found:
            self.showing[domain][value] += 1
            self.files_with.setdefault(value, []).append(mask_name)
        return picture_hash(own_pixels(image))

    def _show(self, domain: str, content: bytes, name: str, values: NDArray[np.uint8]) -> None:
        shown = self.first.setdefault((domain, IMAGES), [])
        if len(shown) < IN_A_ROW:
            shown.append(np.asarray(opened(content, name)))
            # Steps of 37 keep the shades of neighbouring classes apart; 255 stays white.
            shades = np.where(values == IGNORED, 255, values.astype(np.int64) * 37 % 251).astype(np.uint8)
            self.first.setdefault((domain, MASKS), []).append(np.repeat(shades[..., None], 3, axis=2))

    def _classes(self) -> tuple[tuple[str, ...], dict[int, int]]:
        """The classes, and which value of the masks is which; values beyond the list of classes are problems."""
        values = set(self.files_with)
        one_thing = values == {0, IGNORED}
        meaning = {0: 0, IGNORED: 1} if one_thing else {value: value for value in sorted(values - {IGNORED})}
        if not one_thing:
            self.problems += [f"{name} gives no pixel a class: all are {IGNORED}, which is left out." for name in self.white]
        names = self.names or tuple(str(label) for label in range(max(meaning.values(), default=0) + 1))
        for value, label in meaning.items():
            if label >= len(names):
                files = self.files_with[value]
                self.problems.append(
                    f"{len(files)} mask{'s' * (len(files) != 1)} hold{'s' * (len(files) == 1)} the value {value}, and classes.txt names the "
                    f"{len(names)} classes 0 to {len(names) - 1}: {', '.join(files[:3])}{' ...' if len(files) > 3 else ''}."
                )
        return names, {value: label for value, label in meaning.items() if label < len(names)}

    def result(self, path: str) -> OwnCheckResult:
        """What was found."""
        classes, meaning = self._classes()
        by_class = {
            domain: tuple(sum(counts[value] for value, label in meaning.items() if label == place) for place in range(len(classes)))
            for domain, counts in self.showing.items()
        }
        unseen = [name for place, name in enumerate(classes) if not any(by[place] for by in by_class.values())]
        notes = [f"No mask shows the class {', '.join(unseen)}."] if unseen else []
        more = len(self.problems) - NAMED_AT_MOST
        shown = self.problems if more <= 0 else [*self.problems[:NAMED_AT_MOST], f"And {more} more such problems."]
        return OwnCheckResult(
            name=self.folder.resolve().name,
            root=path,
            classes=classes,
            counts=self.counts,
            by_class=by_class,
            sizes={domain: size_words(sizes) for domain, sizes in self.sizes.items() if sizes},
            modes=dict(self.modes.most_common()),
            notes=(*notes, *self.duplicates.across_domains()),
            problems=(*shown, *self.duplicates.leaks()),
        )
