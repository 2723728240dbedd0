"""Files and folders that only this account may read, and folders that one process at a time uses."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyfed.errors import SettingError
from polyfed.runs.folder.atomic_write import write_atomically

PRIVATE_FOLDER = 0o700
OTHERS = 0o077


def private_folder(folder: Path) -> Path:
    """Make a folder that only this account may enter; one that belongs to somebody else is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    except FileExistsError as error:
        raise SettingError(f"{folder} is a file. Name a folder.") from error
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise SettingError(f"{folder} belongs to another account. Name another folder.")
    if found.st_mode & OTHERS:
        folder.chmod(PRIVATE_FOLDER)
    return folder


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; it is private from its first byte on."""
    write_atomically(path, content, part_suffix=f".{secrets.token_hex(4)}", private=True)


@contextmanager
def used_alone(folder: Path, who: str) -> Iterator[None]:
    """Nobody else uses the folder inside the block; a second process is refused."""
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingError(f"A {who} already runs in {folder}. Stop it first, or name another --folder.") from error
        yield


def secret_in(path: Path) -> bytes:
    """The random secret of a file; made with the first use."""
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return path.read_bytes()
