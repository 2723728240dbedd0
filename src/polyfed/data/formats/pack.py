"""Pack images into a tar of resized images with the same names, which can be read instead of the original folders."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from polyfed.data.store.archives import file_tree, sha256_of
from polyfed.data.store.images import DEEP_MODES, decoded, fitted, is_image, rgb
from polyfed.errors import DataError, SettingError

QUALITY = 90


@dataclass(frozen=True)
class Packed:
    """Number of packed images and other files, and size and checksum of the archive."""

    images: int
    others: int
    bytes: int
    sha256: str


def _shallow(content: bytes, name: str) -> Image.Image:
    image = decoded(content, name)
    if image.mode in DEEP_MODES:
        raise DataError(f"Cannot pack {name}: it has more than 8 bits, and JPEG has 8. Use the files as they are.")
    return image


def pack(source: Path, size: int, out: Path) -> Packed:
    """Write a new tar with every image resized to a square JPEG of quality 90 under its original name. Other files are copied."""
    if size < 1:
        raise SettingError(f"--size must be at least 1, got {size}.")
    if not source.exists():
        raise DataError(f"Folder or archive not found: {source}.")
    if out.suffix != ".tar" or out.exists():
        raise DataError(f"--out must be a new file that ends in .tar, got {out}.")
    tree = file_tree(source)
    top = f"{source.resolve().name}/" if source.is_dir() else ""
    names, images = list(tree.names), 0
    if any("masks" in name.split("/") for name in names):
        raise DataError(f"Cannot pack {source}: it contains masks, and resizing would change their values.")
    unfinished = out.with_name(f"{out.name}.part")
    try:
        with tarfile.open(unfinished, "w") as archive:
            for name in names:
                content = tree.read(name)
                if is_image(name):
                    resized = io.BytesIO()
                    fitted(rgb(_shallow(content, name), name), size).save(resized, "JPEG", quality=QUALITY)
                    content, images = resized.getvalue(), images + 1
                entry = tarfile.TarInfo(top + name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        os.replace(unfinished, out)
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return Packed(images, len(names) - images, out.stat().st_size, sha256_of(out))
