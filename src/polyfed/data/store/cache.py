"""Decoded arrays stored on disk, so that images are decoded once and memory-mapped ever after.

An entry is a folder ``<key>/`` with one ``.npy`` file per array and ``about.json``, which holds their
checksums. The key is a sha256 over the recipe and the identity (path, bytes, time of change) of every
file it was made from, so a changed file makes a new entry. An entry is written to a temporary
folder and renamed; one whose checksums do not fit is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import PIL
from numpy.typing import NDArray

from polyfed.data.store.archives import FileIdentity
from polyfed.errors import DataError

RECIPE_VERSION = 2
"""Raise it when the same files and options shall give other arrays."""

MAPPED_FROM_BYTES = 1 << 20
IN_FILE_FROM_BYTES = 1 << 28
ROWS_AT_ONCE = 8
_CHUNK = 1 << 22

Arrays: TypeAlias = dict[str, NDArray[Any]]

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where decoded arrays are stored: ``POLYFED_CACHE``, else ``~/.cache/polyfed``."""
    chosen = os.environ.get("POLYFED_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "polyfed"


def cached(recipe: Mapping[str, object], files: Sequence[FileIdentity], build: Callable[[], Arrays]) -> Arrays:
    """The arrays this recipe makes of these files: from the cache, or built and stored.

    Large arrays are mapped copy-on-write: they can be read by many processes at the cost of one, and
    writing to them never reaches the disk.

    Args:
        recipe: Everything besides the files that decides the arrays.
        files: What they are made from.
        build: Makes them.
    """
    entry = cache_folder() / cache_key(recipe, files)
    if entry.is_dir():
        try:
            return _load(entry)
        except DataError as error:
            _log.warning("%s It is made again.", error)
    _store(entry, build())
    return _load(entry)


class Growing:
    """Arrays of bytes that are filled row by row; large ones lie in an unnamed file of the cache folder, so that memory holds a few rows."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.arrays = [self._made(shape) for shape in shapes]

    @staticmethod
    def _made(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if math.prod(shape) < IN_FILE_FROM_BYTES:
            return np.zeros(shape, np.uint8)
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache_folder()) as file:  # the mapping outlives the name and the handle
                return np.memmap(file, np.uint8, "w+", shape=shape)
        except OSError as error:
            raise DataError(
                f"Decoded images cannot be stored in {cache_folder()}: {error}. Set POLYFED_CACHE to a writable folder with room."
            ) from error

    def let_go_after(self, row: int) -> None:
        """Every few rows, write what was filled to the file, and take it out of memory."""
        if row % ROWS_AT_ONCE == 0:
            for array in self.arrays:
                _let_go(array)


def _let_go(array: NDArray[Any]) -> None:
    """Write an array that lies in a file to it, and take it out of memory."""
    if isinstance(array, np.memmap):
        array.flush()
        array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def cache_key(recipe: Mapping[str, object], files: Sequence[FileIdentity]) -> str:
    """The name under which what this recipe makes of these files is stored."""
    parts = {"version": RECIPE_VERSION, "pillow": PIL.__version__, "recipe": dict(recipe), "files": list(files)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _load(entry: Path) -> Arrays:
    try:
        about = json.loads((entry / "about.json").read_text())
        checksums = {str(name): int(value) for name, value in about["crc32"].items()}
        for name, expected in checksums.items():
            if _crc32(entry / f"{name}.npy") != expected:
                raise DataError(f"The cache entry {entry} is damaged: {name}.npy has changed.")
        return {name: _array(entry / f"{name}.npy") for name in checksums}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"The cache entry {entry} is damaged: {error}.") from error


def _array(path: Path) -> NDArray[Any]:
    large = path.stat().st_size >= MAPPED_FROM_BYTES
    found: NDArray[Any] = np.load(path, mmap_mode="c" if large else None, allow_pickle=False)
    return found


def _store(entry: Path, arrays: Arrays) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=entry.parent))
        try:
            for name, values in arrays.items():
                _save(temporary / f"{name}.npy", values)
            checksums = {name: _crc32(temporary / f"{name}.npy") for name in arrays}
            (temporary / "about.json").write_text(json.dumps({"crc32": checksums}))
            _put_in_place(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"Decoded images cannot be stored in {entry.parent}: {error}. Set POLYFED_CACHE to a writable folder with room."
        ) from error


def _save(path: Path, values: NDArray[Any]) -> None:
    """Write an array as .npy; one that lies in a file, a few rows at a time."""
    if not isinstance(values, np.memmap):
        np.save(path, values, allow_pickle=False)
        return
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(values))
        for start in range(0, len(values), ROWS_AT_ONCE):
            stream.write(values[start : start + ROWS_AT_ONCE].tobytes())
            _let_go(values)


def _put_in_place(temporary: Path, entry: Path) -> None:
    """Rename the new entry into place; a sound one that another process made meanwhile stays."""
    if entry.is_dir() and not _is_sound(entry):
        damaged = Path(tempfile.mkdtemp(prefix=".old-", dir=entry.parent))
        with contextlib.suppress(FileNotFoundError):  # another process may have set it aside first
            entry.rename(damaged / "entry")
        shutil.rmtree(damaged)
    try:
        temporary.rename(entry)
    except OSError:
        if not _is_sound(entry):
            raise


def _is_sound(entry: Path) -> bool:
    try:
        return bool(_load(entry))
    except DataError:
        return False


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
