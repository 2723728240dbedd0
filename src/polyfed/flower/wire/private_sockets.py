"""Unix sockets that only this account reaches: in a folder of its own, with paths that are short enough."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from polyfed.errors import ClientFailure

LONGEST_PATH = 100


def socket_in(folder: Path, name: str) -> Path:
    """The path of a socket in this folder, or, where that is too long for a socket, in one for temporary files."""
    if len(str(folder / name).encode()) > LONGEST_PATH:
        folder = Path(tempfile.gettempdir()) / f"polyfed-{os.getuid()}"
    return private(folder) / name


def private(folder: Path) -> Path:
    """A folder that only this user may enter."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise ClientFailure(f"{folder} belongs to somebody else. Name another folder with --node-config 'state=\"DIR\"'.")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder
