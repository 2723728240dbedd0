"""The user's own images in any folder ``root/<domain>/<class>/*``: ``image_folder(root="my_images", size=96)``.

A plain path works too, with the defaults: ``polyfed run ./my_images``. Classes and domains are those of the folder, so this is
no ``Declaration``.
"""

from __future__ import annotations

from pathlib import Path

from polyfed.data.own.own_images import SPLIT_WORDS, OwnImage, OwnImages, registered_own
from polyfed.data.store.archives import FolderTree, contents
from polyfed.data.store.domain_files import first_of
from polyfed.data.store.images import IMAGE_SUFFIXES, is_image
from polyfed.errors import DataError

LAYOUT = "folder <domain>/<class>/*"
SPLIT_LAYOUT = "folders train/<domain>/<class>/* and test/<domain>/<class>/*"


def found_in(root: Path) -> OwnImages:
    """The images of a folder."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder of images: {contents(root)}. Expected <domain>/<class>/<image> in it.")
    tree = FolderTree(root)
    pre_split = all((root / split).is_dir() and _has_class_folders(root / split) for split in ("train", "test"))
    images, strays = [], []
    for name in filter(is_image, tree.names):
        *_, domain, label, _ = ["", "", *name.split("/")]
        split = SPLIT_WORDS.get(name.split("/")[0].lower(), "") if pre_split else ""
        if name.count("/") == 2 + pre_split and (split or not pre_split):
            images.append(OwnImage(name, domain, label, split=split))
        else:
            strays.append(name)
    if not images:
        raise _nothing_found(root, strays)
    empty = _empty_folders(root, {image.name.rpartition("/")[0] for image in images}, 1 + pre_split)
    return OwnImages(
        root=root,
        name=root.resolve().name,
        tree=tree,
        layout=SPLIT_LAYOUT if pre_split else LAYOUT,
        images=images,
        classes=tuple(sorted({image.label for image in images} | {folder.rpartition("/")[2] for folder in empty})),
        reader='image_folder(root="FOLDER"',
        notes=(*_notes(root, tree, strays, empty), *_perhaps_splits(root, images, pre_split)),
    )


def _nothing_found(root: Path, strays: list[str]) -> DataError:
    endings = ", ".join(suffix[1:] for suffix in IMAGE_SUFFIXES)
    flat = f" {len(strays)} images lie elsewhere: {first_of(strays)}. Move them to <domain>/<class>/." if strays else ""
    return DataError(f"{root} holds no images in <domain>/<class>/: {contents(root)}. Images end in {endings}.{flat}")


def _has_class_folders(split: Path) -> bool:
    """A domain called train would hold images two levels down; a split called train holds folders there."""
    return any(inner.is_dir() for domain in split.iterdir() if domain.is_dir() for inner in domain.iterdir())


def _empty_folders(root: Path, used: set[str], depth: int) -> list[str]:
    """Class folders without an image, by their paths."""
    levels = [root]
    for _ in range(depth + 1):
        levels = [
            inner for folder in levels for inner in sorted(folder.iterdir()) if inner.is_dir() and not inner.name.startswith(".")
        ]
    return [path for folder in levels if (path := folder.relative_to(root).as_posix()) not in used]


def _notes(root: Path, tree: FolderTree, strays: list[str], empty: list[str]) -> list[str]:
    others = [name for name in tree.names if not is_image(name)]
    found = {
        f"empty class folder{_s(empty)}, a class all the same": empty,
        f"file{_s(others)} not read: the name does not end like an image": others,
        f"image{_s(strays)} not read: not in a folder <domain>/<class>/": strays,
    }
    return [f"{root}: {len(names)} {what}: {first_of(names)}." for what, names in found.items() if names]


def _perhaps_splits(root: Path, images: list[OwnImage], pre_split: bool) -> list[str]:
    domains = {image.domain for image in images}
    if pre_split or not domains <= set(SPLIT_WORDS):
        return []
    return [
        f"{root}: the domains are called {' and '.join(sorted(domains))}. If these are splits, put a folder for the domain into "
        "each: train/<domain>/<class>/."
    ]


def _s(names: list[str]) -> str:
    return "" if len(names) == 1 else "s"


image_folder = registered_own(
    "image_folder",
    """The user's own images in ``root/<domain>/<class>/*`` (jpg, png, bmp, gif, webp, tif).

    Classes are the union of all class folders, empty ones too. A domain may lack classes. If there are ``root/train`` and
    ``root/test`` with domains in them, they are the splits (and ``root/validation``, if there, a third); otherwise
    each domain is split by class, from the sorted file names and the seed alone. Images are turned as their EXIF tag says and
    resized to a square, whatever their aspect ratio, or cut to their middle square first (``middle_square``); of a moving image
    the first frame counts. Images of more than 8 bits are scaled by one rule for each domain
    (``polyfed.data.store.images.deep_range``).
    """,
    root="The folder.",
    find=found_in,
)
