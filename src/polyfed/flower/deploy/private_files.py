"""Files, folders and sockets that only this account may use."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from polyfed.errors import SettingError
from polyfed.runs.folder.atomic_write import write_atomically

PRIVATE_FOLDER = 0o700
OTHERS = 0o077
LONGEST_SOCKET_PATH = 100


def private_folder(folder: Path, advice: str = "Name another folder.") -> Path:
    """Make a folder that only this account may enter; one that belongs to somebody else is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    except FileExistsError as error:
        raise SettingError(f"{folder} is a file. Name a folder.") from error
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise SettingError(f"{folder} belongs to another account. {advice}")
    if found.st_mode & OTHERS:
        folder.chmod(PRIVATE_FOLDER)
    return folder


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; it is private from its first byte on."""
    write_atomically(path, content, part_suffix=f".{secrets.token_hex(4)}", private=True)


def socket_in(folder: Path, name: str) -> Path:
    """The path of a unix socket in this folder, or, where that is too long for a socket, in one for temporary files."""
    if len(str(folder / name).encode()) > LONGEST_SOCKET_PATH:
        folder = Path(tempfile.gettempdir()) / f"polyfed-{os.getuid()}"
    return private_folder(folder, "Name another folder with --node-config 'state=\"DIR\"'.") / name
