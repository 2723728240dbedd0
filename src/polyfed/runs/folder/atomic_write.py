"""Write a file atomically: to a temporary file that is synced and renamed, before its folder is synced."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from polyfed.trees import Piece

CHUNK_BYTES = 1 << 20
"""Bytes that are hashed and then written: small enough to be still in the CPU cache when they are written."""
UNFINISHED = ".part"
PRIVATE_FILE = 0o600


def write_atomically(
    path: Path, data: str | bytes | Iterable[Piece], sync: bool = True, part_suffix: str = UNFINISHED, private: bool = False
) -> str:
    """Write a file so that a crash leaves either the old file or the new one.

    Args:
        path: The file.
        data: Text, bytes, or pieces of bytes.
        sync: Sync the folder too. For many files in one folder, only the last one needs this.
        part_suffix: Suffix of the temporary file; processes that may write the same file need different ones.
        private: Create the file readable by this account only; the temporary file must not exist yet.

    Returns:
        SHA-256 digest of the file.
    """
    total = hashlib.sha256()
    part = path.with_name(path.name + part_suffix)
    try:
        with open(part, "wb", opener=_private if private else None) as file:
            for chunk in chunks(data):
                total.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)
    return total.hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, PRIVATE_FILE)


def sync_folder(folder: Path) -> None:
    """Make file names in a folder durable."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders; its renames are durable without
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def chunks(data: str | bytes | Iterable[Piece]) -> Iterator[Piece]:
    pieces = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]
