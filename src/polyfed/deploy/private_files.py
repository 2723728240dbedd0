"""Files and folders that only this account may read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from polyfed.errors import SettingError

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
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
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    data = content.encode() if isinstance(content, str) else content
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def secret_in(path: Path) -> bytes:
    """The random secret of a file; made with the first use."""
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return path.read_bytes()
