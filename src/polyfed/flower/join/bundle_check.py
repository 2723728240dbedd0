"""Flower's app bundles at a node: settings may come in; code may not, unless the node lists its hash.

Nothing of a bundle is unpacked or imported before it was checked. A node runs polyfed's own ClientApp whatever the bundle names.
"""

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
PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""The compressions that Flower uses; others take as much memory as the file says."""
UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError)


def check_bundle(content: bytes, code: Collection[str]) -> list[str]:
    """Refuse a bundle that brings code whose SHA-256 (its own or its files') is not in ``code``; returns the files with code."""
    own = hashlib.sha256(content).hexdigest()
    files = read_bundle(content)
    project = read_project(files)
    others = sorted(set(files) - HARMLESS)
    unlisted = [name for name in others if hashlib.sha256(files[name]).hexdigest() not in code]
    if own not in code and unlisted:
        raise Refused(f"The app bundle {own[:16]} brings code that this node does not list: {', '.join(unlisted)[:500]}.")
    named = _value_at(project, "tool", "flwr", "app", "components", "clientapp")
    if named != CLIENT_APP:
        raise Refused(f"The app bundle {own[:16]} names another ClientApp ({str(named)[:200]}). This node runs {CLIENT_APP} only.")
    if _value_at(project, "project", "dependencies"):
        raise Refused(f"The app bundle {own[:16]} wants packages installed. Nothing is installed here.")
    return others


def read_bundle(content: bytes) -> dict[str, bytes]:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as bundle:
            if sum(info.file_size for info in bundle.infolist()) > LARGEST:
                raise Refused(f"The app bundle would unpack to more than {LARGEST} bytes.")
            if any(info.compress_type not in PLAIN for info in bundle.infolist()):
                raise zipfile.BadZipFile("another compression")
            return {info.filename: bundle.read(info) for info in bundle.infolist() if not info.is_dir()}
    except Refused:
        raise
    except UNREADABLE as error:
        raise Refused("The app bundle is no zip file that can be read.") from error


def read_project(files: dict[str, bytes]) -> dict[str, Any]:
    try:
        return tomllib.loads(files[PROJECT].decode())
    except (KeyError, ValueError, RecursionError) as error:
        raise Refused(f"The app bundle has no {PROJECT} that can be read.") from error


def _value_at(table: Any, *names: str) -> Any:
    """What lies in tables within tables; None where there is none."""
    for name in names:
        table = table.get(name) if isinstance(table, dict) else None
    return table
