"""The audit log: JSON lines, each with the hash of the line before it, so that a line that was changed or taken out is found.

The chain finds changes; it does not prevent them. Whoever may write the file can write a whole new chain, and lines taken from the end
leave a shorter one that is whole. So note the number of lines and the last hash elsewhere: ``polyfed audit verify FILE`` prints them,
and ``--expect HASH`` asks whether a hash noted before is still in the chain.
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
LONGEST_TEXT = 2000
LAST_LINE_AT_MOST = 1 << 16


class Verified(NamedTuple):
    """A chain that is whole."""

    lines: int
    last: str


class AuditLog:
    """Appends to an audit file; several processes may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, event: str, **values: Any) -> None:
        """Add a line, and wait until it is on the disk."""
        with self._alone() as file:
            _append(file, event, values, *_last_hash(file))

    def write_after(self, event: str, next_values: Callable[[Iterator[dict[str, Any]]], Mapping[str, Any]]) -> None:
        """Add a line that follows from all lines before it, which are verified; nobody else writes meanwhile.

        Args:
            event: what happened.
            next_values: makes the values of the line from the lines before it; where it raises an error, no line is added.
        """
        with self._alone() as file:
            last = _last_hash(file)
            _append(file, event, next_values(verified_lines(self.path)), *last)

    @contextmanager
    def _alone(self) -> Iterator[BinaryIO]:
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
        # Texts of strangers may be of any length.
        **{name: value[:LONGEST_TEXT] if isinstance(value, str) else value for name, value in values.items()},
        **({"torn_bytes_removed": torn} if torn else {}),
        "previous": previous,
    }
    file.write((json.dumps(line | {"hash": _hash_of(line)}) + "\n").encode())
    file.flush()
    os.fsync(file.fileno())


def _hash_of(line: dict[str, Any]) -> str:
    """The hash of a line without its own hash; it covers the hash of the line before."""
    text = json.dumps({name: value for name, value in line.items() if name != "hash"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _last_hash(file: BinaryIO) -> tuple[str, int]:
    """The hash of the last line, and how many bytes of a line that a power cut left unfinished were removed."""
    size = file.seek(0, os.SEEK_END)
    begin = max(0, size - LAST_LINE_AT_MOST)
    file.seek(begin)
    tail = file.read()
    whole = tail.rfind(b"\n") + 1
    torn = len(tail) - whole
    if torn:
        file.truncate(begin + whole)
    lines = tail[:whole].splitlines()
    if not lines:
        return FIRST, torn
    try:
        return str(json.loads(lines[-1])["hash"]), torn
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("The last line of the audit file cannot be read; move the file away, and keep it.") from error


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of an audit file, one after the other, unverified."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise DataError(f"{path}: line {number} is no JSON; it was cut off or changed.") from error
            if not isinstance(line, dict):
                raise DataError(f"{path}: line {number} is no entry of an audit log.")
            yield line


def verify(path: Path, expected: str = "") -> Verified:
    """Follow the chain from its first line to its last.

    Args:
        path: the audit file.
        expected: a hash that was noted before and must still be there.
    """
    if not path.is_file():
        raise DataError(f"There is no audit file {path}.")
    hashes = [str(line["hash"]) for line in verified_lines(path)]
    if expected and expected not in hashes:
        raise DataError(
            f"{path}: the hash {expected} is not in the chain of {len(hashes)} lines; lines were taken out, or all was written again."
        )
    return Verified(len(hashes), hashes[-1] if hashes else FIRST)


def verified_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of an audit file, one after the other; one that does not fit into the chain is an error."""
    previous = FIRST
    for count, line in enumerate(lines_of(path), 1):
        if line.get("previous") != previous:
            raise DataError(
                f"{path}: line {count} does not follow the line before it; something was changed, added or taken out there."
            )
        if line.get("hash") != _hash_of(line):
            raise DataError(f"{path}: line {count} was changed; its hash does not fit what it says.")
        previous = str(line["hash"])
        yield line
