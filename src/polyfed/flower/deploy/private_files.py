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


class ForeignFolder(SettingError):
    """The folder belongs to another account."""


def private_folder(folder: Path) -> Path:
    """Create a folder that only this account may enter."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
    except FileExistsError as error:
        raise SettingError(f"{folder} is a file. Pass a folder.") from error
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise ForeignFolder(f"{folder} belongs to another account. Choose another folder.")
    if found.st_mode & OTHERS:
        folder.chmod(PRIVATE_FOLDER)
    return folder


def write_private(path: Path, content: str | bytes) -> None:
    """Write a private file atomically."""
    # Not at the top: it imports torch, which short-lived processes do not need.
    from polyfed.runs.folder.atomic_write import write_atomically

    write_atomically(path, content, part_suffix=f".{secrets.token_hex(4)}", private=True)


def socket_in(folder: Path, name: str) -> Path:
    """Return the path of a unix socket in this folder, or in a temporary folder if the path would be too long."""
    if len(str(folder / name).encode()) > LONGEST_SOCKET_PATH:
        folder = Path(tempfile.gettempdir()) / f"polyfed-{os.getuid()}"
    try:
        return private_folder(folder) / name
    except ForeignFolder as error:
        problem = f"{folder} belongs to another account. Choose another folder with --node-config 'state=\"DIR\"'."
        raise ClientFailure(problem) from error


def home_of(config: Mapping[str, object]) -> Path:
    """Return the folder for a node's state."""
    if folder := config.get("state"):
        return Path(str(folder)).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "polyfed" / "nodes"
