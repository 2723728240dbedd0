"""List and remove the decoded images in the cache, which are copies of possibly private images."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from polyfed.data.store.cache import ABOUT, HUGGING_FACE, TEMPORARY, cache_folder
from polyfed.errors import DataError

UNKNOWN = "unknown"
"""Data set of copies that an older version wrote."""
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Copy:
    """Decoded images of one domain.

    Attributes:
        data: Data set name, or name of the folder or table.
        root: Folder or table that was read.
        files: Files and folders in the cache.
        last_use: When it was last written or opened.
    """

    data: str
    domain: str
    root: str
    files: tuple[Path, ...]
    bytes: int
    last_use: datetime


def list_copies(only: str | None = None) -> list[Copy]:
    """Return the copies in the cache, the last used first. ``only`` is a data set name, a folder or a table."""
    folder = cache_folder()
    try:
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        found = sorted(_copies_in(paths), key=lambda copy: (copy.last_use, copy.files), reverse=True)
    except OSError as error:
        raise DataError(f"Cannot read the cache {folder}: {error.strerror or error}.") from error
    return found if only is None else [copy for copy in found if _is_of(copy, only)]


def remove_copies(copies: Sequence[Copy]) -> None:
    """Remove copies. A run that is reading them continues; the next one decodes the images again."""
    for copy in copies:
        for path in copy.files:
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            except OSError as error:
                raise DataError(f"Cannot remove {path}: {error.strerror or error}.") from error


def _copies_in(paths: Sequence[Path]) -> Iterator[Copy]:
    """Yield the copies. Files that polyfed did not write are ignored."""
    for path in paths:
        if path.is_dir() and _KEY.fullmatch(path.name):
            yield _copy((path,), path / ABOUT)
        elif path.suffix == ".pixels" and _KEY.fullmatch(path.stem):
            files = (path, path.with_suffix(".crc32"), path.with_suffix(".json"))
            yield _copy(tuple(file for file in files if file.exists()), path.with_suffix(".json"))
        elif path.is_dir() and (path.name == HUGGING_FACE or path.name.startswith(TEMPORARY)):
            data = "Hugging Face copies" if path.name == HUGGING_FACE else "unfinished copy"
            yield _copy((path,), path, data)


def _copy(files: tuple[Path, ...], about: Path, data: str = UNKNOWN) -> Copy:
    try:
        origin = json.loads(about.read_text()).get("origin", {})
    except (OSError, ValueError, AttributeError):
        origin = {}
    inner = [inner for path in files for inner in ([path, *path.rglob("*")] if path.is_dir() else [path])]
    used = (about if about.exists() else files[0]).stat().st_mtime
    return Copy(
        data=str(origin.get("data", data)),
        domain=str(origin.get("domain", "")),
        root=str(origin.get("root", "")),
        files=files,
        bytes=sum(each.lstat().st_blocks * 512 for each in inner if not each.is_dir()),
        last_use=datetime.fromtimestamp(used, UTC),
    )


def _is_of(copy: Copy, only: str) -> bool:
    root = Path(only).expanduser().resolve()
    inside = bool(copy.root) and (Path(copy.root) == root or root in Path(copy.root).parents)
    return inside or copy.data.replace("_", "-") == only.replace("_", "-")
