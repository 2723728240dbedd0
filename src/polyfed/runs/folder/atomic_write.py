"""The one way to write a file that must be whole or not there: written to a part file, synced, renamed, and the folder synced."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from polyfed.trees import Piece

CHUNK_BYTES = 1 << 20
"""What is hashed and then written at a time: it is still in the processor's cache when it is written."""
UNFINISHED = ".part"
PRIVATE_FILE = 0o600


def write_atomically(
    path: Path, data: str | bytes | Iterable[Piece], sync: bool = True, part_suffix: str = UNFINISHED, private: bool = False
) -> str:
    """Write a file so that a crash leaves the old one or the new one, never a part; returns the SHA-256 of its bytes.

    Args:
        path: the file.
        data: its text, its bytes, or its bytes in pieces.
        sync: make the new name durable too. Of many files in a folder, only the last need do so.
        part_suffix: how the part file's name ends; where several processes may write the same file, each needs its own.
        private: only this account may read the file, from its first byte on; the part file must not be there yet.
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
    """Make the names in a folder durable, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows cannot open folders; its renames are durable without
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def chunks(data: str | bytes | Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in chunks that stay in the cache."""
    pieces = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]
