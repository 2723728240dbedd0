"""The audit log: JSON lines, each with the hash of the previous one, so that changed or removed lines are detected.

The chain detects changes but does not prevent them. Anyone with write access can write a new chain, and a chain without its last lines
is still valid. Therefore note the number of lines and the last hash elsewhere: ``polyfed audit verify FILE`` prints them, and
``--expect HASH`` checks that a hash noted before is still in the chain.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from polyfed.errors import DataError
from polyfed.runs.folder.atomic_write import PRIVATE_FILE, sync_folder

FIRST = "0" * 64
MAX_TEXT = 2000
MAX_LAST_LINE = 1 << 16


class Verified(NamedTuple):
    """A valid chain: its number of lines and its last hash."""

    lines: int
    last: str


class AuditLog:
    """Appends to an audit file; safe for several processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **values: Any) -> None:
        """Add a line, and wait until it is on disk."""
        with self._locked() as file:
            _append(file, event, values, *_last_hash(file))

    def write_after(self, event: str, next_values: Callable[[Iterator[dict[str, Any]]], Mapping[str, Any]]) -> None:
        """Add a line that depends on all previous lines, while no other process can write.

        Args:
            event: Name of the event.
            next_values: Computes the values of the line from the previous lines, which are verified. If it raises, no line is added.
        """
        with self._locked() as file:
            last = _last_hash(file)
            _append(file, event, next_values(verified_lines(self.path)), *last)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        new = not self.path.exists()
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        with os.fdopen(handle, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        if new:
            sync_folder(self.path.parent)


def _append(file: BinaryIO, event: str, values: Mapping[str, Any], previous: str, torn: int) -> None:
    line = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "event": event,
        # Text from outsiders may have any length.
        **{name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in values.items()},
        **({"torn_bytes_removed": torn} if torn else {}),
        "previous": previous,
    }
    file.write((json.dumps(line | {"hash": _hash_of(line)}) + "\n").encode())
    file.flush()
    os.fsync(file.fileno())


def _hash_of(line: dict[str, Any]) -> str:
    """Return the hash of a line without its ``hash``, but with the hash of the previous line."""
    text = json.dumps({name: value for name, value in line.items() if name != "hash"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _last_hash(file: BinaryIO) -> tuple[str, int]:
    """Remove a line that a power failure left incomplete; return the last hash and the number of removed bytes."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - MAX_LAST_LINE)
    file.seek(start)
    tail = file.read()
    complete = tail.rfind(b"\n") + 1
    torn = len(tail) - complete
    if torn:
        file.truncate(start + complete)
    lines = tail[:complete].splitlines()
    if not lines:
        return FIRST, torn
    try:
        return str(json.loads(lines[-1])["hash"]), torn
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "Cannot read the last line of the audit file. Move the file to a safe place, and start a new one."
        ) from error


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an audit file without verifying them."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise DataError(f"{path}: line {number} is not valid JSON; it was truncated or changed.") from error
            if not isinstance(line, dict):
                raise DataError(f"{path}: line {number} is not an audit log entry.")
            yield line


def verify(path: Path, expected: str = "") -> Verified:
    """Verify the whole chain, and that it contains the expected hash, if any."""
    if not path.is_file():
        raise DataError(f"Audit file not found: {path}.")
    hashes = [str(line["hash"]) for line in verified_lines(path)]
    if expected and expected not in hashes:
        raise DataError(
            f"{path}: the chain of {len(hashes)} lines does not contain the hash {expected}; lines were removed, or the file was rewritten."
        )
    return Verified(len(hashes), hashes[-1] if hashes else FIRST)


def verified_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of an audit file; raise an error at the first one that breaks the chain."""
    previous = FIRST
    for count, line in enumerate(lines_of(path), 1):
        if line.get("previous") != previous:
            raise DataError(
                f"{path}: line {count} does not follow from the previous line; a line was changed, added or removed there."
            )
        if line.get("hash") != _hash_of(line):
            raise DataError(f"{path}: line {count} was changed; its hash does not match its content.")
        previous = str(line["hash"])
        yield line
