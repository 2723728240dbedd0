"""Cache decoded arrays on disk, so that images are decoded once and memory-mapped afterwards.

An entry is a folder ``<key>/`` with one ``.npy`` file per array and ``about.json``, which contains their checksums and the origin of the
data; its modification time is the last use. The key is a
sha256 over the recipe and the identity (path, size, modification time) of every source file, so that a changed file creates a new
entry. An entry is written to a temporary folder and renamed. An entry with a wrong checksum is rebuilt.
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

ABOUT = "about.json"
HUGGING_FACE = "huggingface"
"""Folder of the tables that Hugging Face ``datasets`` writes from Parquet files."""
TEMPORARY = (".new-", ".old-")
"""Prefixes of entries that are being written or replaced."""
RECIPE_VERSION = 2
"""Increase this number if the same files and options yield different arrays."""

MAPPED_FROM_BYTES = 1 << 20
IN_FILE_FROM_BYTES = 1 << 28
ROWS_AT_ONCE = 8
_CHUNK = 1 << 22

Arrays: TypeAlias = dict[str, NDArray[Any]]

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return ``POLYFED_CACHE``, or ``~/.cache/polyfed`` if it is not set."""
    variable = os.environ.get("POLYFED_CACHE")
    return Path(variable).expanduser() if variable else Path.home() / ".cache" / "polyfed"


def cached(
    recipe: Mapping[str, object],
    files: Sequence[FileIdentity],
    build: Callable[[], Arrays],
    origin: Mapping[str, str] | None = None,
) -> Arrays:
    """Return the arrays for a recipe and its source files from the cache, or build and store them.

    Large arrays are mapped copy-on-write: several processes share the memory, and changes are never written to disk.

    Args:
        recipe: Everything that determines the arrays besides the files.
        files: Source files.
        build: Computes the arrays.
        origin: Where the images come from (``data``, ``domain``, ``root``), for ``polyfed data cache``.
    """
    entry = cache_folder() / cache_key(recipe, files)
    if entry.is_dir():
        try:
            arrays = _load(entry)
            mark_used(entry / ABOUT)
            return arrays
        except DataError as error:
            _log.warning("%s Rebuilding it.", error)
    _store(entry, build(), origin or {})
    return _load(entry)


def mark_used(file: Path) -> None:
    """Record the time of the last use of an entry."""
    with contextlib.suppress(OSError):  # a cache that cannot be written can still be read
        os.utime(file)


class RowBuffer:
    """Byte arrays that are filled row by row. Large ones are stored in an unnamed file, so that only a few rows are in memory."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.arrays = [self._allocate(shape) for shape in shapes]

    @staticmethod
    def _allocate(shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if math.prod(shape) < IN_FILE_FROM_BYTES:
            return np.zeros(shape, np.uint8)
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache_folder()) as file:  # the mapping stays valid after the file is closed
                return np.memmap(file, np.uint8, "w+", shape=shape)
        except OSError as error:
            raise storage_error(cache_folder(), error) from error

    def release_after(self, row: int) -> None:
        """Every few rows, write the filled rows to the file and release their memory."""
        if row % ROWS_AT_ONCE == 0:
            for array in self.arrays:
                _release(array)


def storage_error(folder: Path, error: Exception) -> DataError:
    """Return the error for a cache folder that cannot be written."""
    return DataError(f"Cannot store decoded images in {folder}: {error}. Set POLYFED_CACHE to a writable folder with enough space.")


def _release(array: NDArray[Any]) -> None:
    """Write a memory-mapped array to its file and release its memory."""
    if isinstance(array, np.memmap):
        array.flush()
        array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def cache_key(recipe: Mapping[str, object], files: Sequence[FileIdentity]) -> str:
    """Return the name of the cache entry for a recipe and its source files."""
    parts = {"version": RECIPE_VERSION, "pillow": PIL.__version__, "recipe": dict(recipe), "files": list(files)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _load(entry: Path) -> Arrays:
    try:
        about = json.loads((entry / ABOUT).read_text())
        checksums = {str(name): int(value) for name, value in about["crc32"].items()}
        for name, expected in checksums.items():
            if _crc32(entry / f"{name}.npy") != expected:
                raise DataError(f"The cache entry {entry} is damaged: {name}.npy has changed.")
        return {name: _open_array(entry / f"{name}.npy") for name in checksums}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"The cache entry {entry} is damaged: {error}.") from error


def _open_array(path: Path) -> NDArray[Any]:
    large = path.stat().st_size >= MAPPED_FROM_BYTES
    found: NDArray[Any] = np.load(path, mmap_mode="c" if large else None, allow_pickle=False)
    return found


def _store(entry: Path, arrays: Arrays, origin: Mapping[str, str]) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY[0], dir=entry.parent))
        try:
            for name, values in arrays.items():
                _save(temporary / f"{name}.npy", values)
            checksums = {name: _crc32(temporary / f"{name}.npy") for name in arrays}
            (temporary / ABOUT).write_text(json.dumps({"crc32": checksums, "origin": dict(origin)}))
            _install(temporary, entry)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise storage_error(entry.parent, error) from error


def _save(path: Path, values: NDArray[Any]) -> None:
    """Write an array as .npy. Write a memory-mapped array a few rows at a time."""
    if not isinstance(values, np.memmap):
        np.save(path, values, allow_pickle=False)
        return
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(values))
        for start in range(0, len(values), ROWS_AT_ONCE):
            stream.write(values[start : start + ROWS_AT_ONCE].tobytes())
            _release(values)


def _install(temporary: Path, entry: Path) -> None:
    """Rename the new entry into place. Keep a valid entry that another process created in the meantime."""
    if entry.is_dir() and not _is_valid(entry):
        damaged = Path(tempfile.mkdtemp(prefix=TEMPORARY[1], dir=entry.parent))
        with contextlib.suppress(FileNotFoundError):  # another process may have moved it first
            entry.rename(damaged / "entry")
        shutil.rmtree(damaged)
    try:
        temporary.rename(entry)
    except OSError:
        if not _is_valid(entry):
            raise


def _is_valid(entry: Path) -> bool:
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
