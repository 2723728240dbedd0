"""Files, folders and sockets that only this account may use."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from polyfed.errors import ClientFailure, SettingError

PRIVATE_FOLDER = 0o700
OTHERS = 0o077
LONGEST_SOCKET_PATH = 100


class NotOurs(SettingError):
    """A folder that belongs to another account."""


def private_folder(folder: Path) -> Path:
    """Make a folder that only this account may enter; one that belongs to somebody else is refused."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    except FileExistsError as error:
        raise SettingError(f"{folder} is a file. Name a folder.") from error
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise NotOurs(f"{folder} belongs to another account. Name another folder.")
    if found.st_mode & OTHERS:
        folder.chmod(PRIVATE_FOLDER)
    return folder


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; it is private from its first byte on."""
    # Imports torch, so not at the top: short-lived processes need only the sockets.
    from polyfed.runs.folder.atomic_write import write_atomically

    write_atomically(path, content, part_suffix=f".{secrets.token_hex(4)}", private=True)


def socket_in(folder: Path, name: str) -> Path:
    """The path of a unix socket in this folder, or, where that is too long for a socket, in one for temporary files."""
    if len(str(folder / name).encode()) > LONGEST_SOCKET_PATH:
        folder = Path(tempfile.gettempdir()) / f"polyfed-{os.getuid()}"
    try:
        return private_folder(folder) / name
    except NotOurs as error:
        message = f"{folder} belongs to somebody else. Name another folder with --node-config 'state=\"DIR\"'."
        raise ClientFailure(message) from error


def home_of(config: Mapping[str, object]) -> Path:
    """The folder for a node's state: what its configuration says, or the user's folder for state."""
    if folder := config.get("state"):
        return Path(str(folder)).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "polyfed" / "nodes"
