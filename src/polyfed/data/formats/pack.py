"""Packs images into one tar of small images under the same names, which is read wherever an archive of the same folders is."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from polyfed.data.store.archives import file_tree, sha256_of
from polyfed.data.store.images import fitted, is_image, opened
from polyfed.errors import DataError, SettingError

QUALITY = 90


@dataclass(frozen=True)
class Packed:
    """What was packed: images, other files, bytes, and the checksum of the archive."""

    images: int
    others: int
    bytes: int
    sha256: str


def pack(source: Path, size: int, out: Path) -> Packed:
    """Write a tar with every image resized to a square, as JPEG of quality 90 under its own name; other files as they are.

    Args:
        source: A folder or an archive.
        size: Side of the images.
        out: The tar to write; it must be new.
    """
    if size < 1:
        raise SettingError(f"--size is {size}; it must be at least 1.")
    if not source.exists():
        raise DataError(f"There is no folder or archive {source}.")
    if out.suffix != ".tar" or out.exists():
        raise DataError(f"{out} must be a new file that ends in .tar.")
    tree = file_tree(source)
    top = f"{source.resolve().name}/" if source.is_dir() else ""
    names, images = list(tree.names), 0
    if any("masks" in name.split("/") for name in names):
        raise DataError(
            f"{source} holds masks, which must stay as they are; packing would make them smaller and change their values."
        )
    unfinished = out.with_name(f"{out.name}.part")
    try:
        with tarfile.open(unfinished, "w") as archive:
            for name in names:
                content = tree.read(name)
                if is_image(name):
                    content, images = _smaller(content, name, size), images + 1
                entry = tarfile.TarInfo(top + name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        os.replace(unfinished, out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return Packed(images, len(names) - images, out.stat().st_size, sha256_of(out))


def _smaller(content: bytes, name: str, size: int) -> bytes:
    made = io.BytesIO()
    fitted(opened(content, name), size).save(made, "JPEG", quality=QUALITY)
    return made.getvalue()
