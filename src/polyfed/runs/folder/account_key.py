"""The key of this account, and the seal it puts under files: who wrote a ``run.toml`` shows by it.

The owner of a file says nothing, since whatever an account unpacks belongs to it. The key never leaves its file.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path

log = logging.getLogger("polyfed")

KEY_BYTES = 32
LINE = b"# seal of the account that wrote this: hmac-sha256 "
PURPOSE = b"polyfed run.toml\0"


def key_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return Path(base) / "polyfed" / "account.key"


def account_key(make: bool = False) -> bytes | None:
    """The key of this account; None where there is none, or none that only this account can read.

    Args:
        make: make a key where there is none.
    """
    path = key_file()
    try:
        if make and not path.exists():
            _make(path)
        with path.open("rb") as file:
            shared = os.fstat(file.fileno()).st_mode & 0o077
            key = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s cannot be used (%s): runs are not sealed.", path, error.strerror or error)
        return None
    if shared or len(key) != KEY_BYTES:
        why = f"others may read it: chmod 600 {path}" if shared else "it is damaged: remove it, and a new one is made"
        log.warning("%s cannot be used (%s). Runs are not sealed.", path, why)
        return None
    return key


def _make(path: Path) -> None:
    """Write a new key that is whole from the first instant; of two processes, one wins."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def sealed(text: str) -> str:
    """The text with a last line that only this account can write; the text as it is where there is no key."""
    key = account_key(make=True)
    body = text if text.endswith("\n") else text + "\n"
    return text if key is None else body + f"{LINE.decode()}{_seal(key, body.encode())}\n"


def is_sealed(content: bytes) -> bool:
    """Whether this account wrote the content, and nobody changed it since."""
    body, line, seal = content.rpartition(LINE)
    if not line:
        return False
    key = account_key()
    return key is not None and hmac.compare_digest(seal, f"{_seal(key, body)}\n".encode())


def _seal(key: bytes, body: bytes) -> str:
    return hmac.new(key, PURPOSE + body, hashlib.sha256).hexdigest()
