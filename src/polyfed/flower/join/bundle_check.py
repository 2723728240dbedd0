"""Check Flower's app bundles before they are unpacked: settings are accepted, code only if the node lists its hash."""

from __future__ import annotations

import hashlib
import io
import struct
import tomllib
import zipfile
import zlib
from collections.abc import Collection
from typing import Any

from polyfed.flower.app import CLIENT_APP, PROJECT, RECIPE
from polyfed.flower.join.policy import Refused

HARMLESS = frozenset({PROJECT, RECIPE, "README.md", ".info/CONTENT"})
LARGEST = 16 * 1024 * 1024
# Other compressions may allocate as much memory as the file claims.
PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError)


def check_bundle(content: bytes, code: Collection[str]) -> list[str]:
    """Return the files of a bundle that contain code, all of which must be allowed by their SHA-256 or that of the bundle."""
    digest = hashlib.sha256(content).hexdigest()
    files = read_bundle(content)
    project = read_project(files)
    others = sorted(set(files) - HARMLESS)
    unlisted = [name for name in others if hashlib.sha256(files[name]).hexdigest() not in code]
    if digest not in code and unlisted:
        raise Refused(f"The app bundle {digest[:16]} contains code that this node does not allow: {', '.join(unlisted)[:500]}.")
    app = _value_at(project, "tool", "flwr", "app", "components", "clientapp")
    if app != CLIENT_APP:
        raise Refused(f"The app bundle {digest[:16]} has another ClientApp ({str(app)[:200]}). This node runs only {CLIENT_APP}.")
    if _value_at(project, "project", "dependencies"):
        raise Refused(f"The app bundle {digest[:16]} has dependencies. This node installs no packages.")
    return others


def read_bundle(content: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            if sum(info.file_size for info in bundle.infolist()) > LARGEST:
                raise Refused(f"The app bundle would unpack to more than {LARGEST} bytes.")
            if any(info.compress_type not in PLAIN for info in bundle.infolist()):
                raise zipfile.BadZipFile("unsupported compression")
            return {info.filename: bundle.read(info) for info in bundle.infolist() if not info.is_dir()}
    except Refused:
        raise
    except UNREADABLE as error:
        raise Refused("The app bundle is not a readable zip file.") from error


def read_project(files: dict[str, bytes]) -> dict[str, Any]:
    try:
        return tomllib.loads(files[PROJECT].decode())
    except (KeyError, ValueError, RecursionError) as error:
        raise Refused(f"The app bundle has no readable {PROJECT}.") from error


def _value_at(table: Any, *names: str) -> Any:
    for name in names:
        table = table.get(name) if isinstance(table, dict) else None
    return table
