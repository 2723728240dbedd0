"""Sign ``run.toml`` with a secret key of the user account, so that polyfed recognises the run folders that this account wrote.

File ownership does not prove this, since all files that an account unpacks belong to it. The key never leaves its file.
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


def account_key(create: bool = False) -> bytes | None:
    """Return the key of this account, and create it if requested; None if it is missing, damaged or readable by other accounts."""
    path = key_file()
    try:
        if create and not path.exists():
            _create(path)
        with path.open("rb") as file:
            shared = os.fstat(file.fileno()).st_mode & 0o077
            key = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("Cannot use %s (%s). Runs are not sealed.", path, error.strerror or error)
        return None
    if shared or len(key) != KEY_BYTES:
        reason = (
            f"other accounts can read it: run chmod 600 {path}"
            if shared
            else "it is damaged: remove it, and polyfed creates a new one"
        )
        log.warning("Cannot use %s (%s). Runs are not sealed.", path, reason)
        return None
    return key


def _create(path: Path) -> None:
    """Create a key atomically; if two processes do so at once, the first key is kept."""
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
    """Return the text with a signature as its last line, or unchanged without a key."""
    key = account_key(create=True)
    body = text if text.endswith("\n") else text + "\n"
    return text if key is None else body + f"{LINE.decode()}{_seal(key, body.encode())}\n"


def is_sealed(content: bytes) -> bool:
    """Return True if this account wrote the content and it is unchanged."""
    body, line, seal = content.rpartition(LINE)
    if not line:
        return False
    key = account_key()
    return key is not None and hmac.compare_digest(seal, f"{_seal(key, body)}\n".encode())


def _seal(key: bytes, body: bytes) -> str:
    return hmac.new(key, PURPOSE + body, hashlib.sha256).hexdigest()
