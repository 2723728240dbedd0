"""Read user-supplied images from folders ``root/<domain>/<class>/*``."""

from __future__ import annotations

from pathlib import Path

from polyfed.data.own.own_images import SPLIT_WORDS, OwnImage, OwnImages, registered_own
from polyfed.data.store.archives import FolderTree, contents
from polyfed.data.store.domain_files import first_of
from polyfed.data.store.images import IMAGE_SUFFIXES, is_image
from polyfed.errors import DataError

LAYOUT = "folder <domain>/<class>/*"
SPLIT_LAYOUT = "folders train/<domain>/<class>/* and test/<domain>/<class>/*"


def find(root: Path) -> OwnImages:
    """Return the images of a folder, not decoded yet."""
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
        endings = ", ".join(suffix[1:] for suffix in IMAGE_SUFFIXES)
        flat = f" {len(strays)} images are in other places: {first_of(strays)}. Move them to <domain>/<class>/." if strays else ""
        raise DataError(f"{root} has no images in <domain>/<class>/: {contents(root)}. Image files end in {endings}.{flat}")
    empty = _empty_folders(root, {image.name.rpartition("/")[0] for image in images}, 1 + pre_split)
    return OwnImages(
        root=root,
        name=root.resolve().name,
        tree=tree,
        layout=SPLIT_LAYOUT if pre_split else LAYOUT,
        images=images,
        classes=tuple(sorted({image.label for image in images} | {folder.rpartition("/")[2] for folder in empty})),
        reader='image_folder(root="FOLDER"',
        notes=tuple(_notes(root, tree, images, strays, empty, pre_split)),
    )


def _has_class_folders(split: Path) -> bool:
    """Return True if a folder called train or test contains domains with class folders, so that it is a split and not a domain."""
    return any(inner.is_dir() for domain in split.iterdir() if domain.is_dir() for inner in domain.iterdir())


def _empty_folders(root: Path, used: set[str], depth: int) -> list[str]:
    levels = [root]
    for _ in range(depth + 1):
        levels = [
            inner for folder in levels for inner in sorted(folder.iterdir()) if inner.is_dir() and not inner.name.startswith(".")
        ]
    return [path for folder in levels if (path := folder.relative_to(root).as_posix()) not in used]


def _notes(root: Path, tree: FolderTree, images: list[OwnImage], strays: list[str], empty: list[str], pre_split: bool) -> list[str]:
    found = {
        "empty class folder(s), kept in the list of classes": empty,
        "file(s) skipped (no image suffix)": [name for name in tree.names if not is_image(name)],
        "image(s) skipped (not in a folder <domain>/<class>/)": strays,
    }
    notes = [
        f"{root}: {len(names)} {what.replace('(s)', 's' * (len(names) != 1))}: {first_of(names)}."
        for what, names in found.items()
        if names
    ]
    domains = {image.domain for image in images}
    if not pre_split and domains <= set(SPLIT_WORDS):
        notes.append(
            f"{root}: the domains are called {' and '.join(sorted(domains))}. If these are splits, add a level for the domain: "
            "train/<domain>/<class>/."
        )
    return notes


image_folder = registered_own(
    "image_folder",
    """Images in ``root/<domain>/<class>/*`` (jpg, png, bmp, gif, webp, tif).

    Classes are the union of all class folders, including empty ones. A domain may lack classes. If ``root/train`` and
    ``root/test`` contain domains, they are the splits, with ``root/validation`` as an optional third; otherwise each domain is
    split by class, depending only on the sorted file names and the seed. Images are rotated according to their EXIF tag and
    resized to a square regardless of their aspect ratio, or cropped to their middle square first (``middle_square``). Of an
    animated image, only the first frame is used. Images of more than 8 bits are scaled by one rule per domain
    (``polyfed.data.store.images.deep_range``).
    """,
    root="The folder.",
    find=find,
)
