"""The manifest of a checkpoint: which files belong to it, with their digests, under a seal of its own. Read without torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import RunFolderError

FORMAT = 2
OLDER = "was written by polyfed 0.1 (format 1), which this version does not read. Open it with polyfed 0.2."


def manifest_files(folder: Path) -> list[Path]:
    """The manifests in a checkpoint folder, newest first; a folder that is there and cannot be read is an error, not an empty one."""
    try:
        return sorted((path for path in folder.iterdir() if path.match("manifest-*.json")), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be read ({error.strerror or error}), so nobody knows what it holds; nothing was changed. "
            "Make it a folder that you may read (chmod u+rwx), or put back a copy."
        ) from error


class Damaged(Exception):
    """A checkpoint file that cannot be trusted; the one before it is tried."""


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with a digest of itself."""
    return {**manifest, "seal": _seal(manifest)}


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest whose seal is whole."""
    try:
        manifest = json.loads(path.read_bytes())
        seal, written_as = manifest.pop("seal"), operator.index(manifest["format"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({type(error).__name__}).") from error
    if written_as > FORMAT:
        raise RunFolderError(
            f"{path} was written by a newer polyfed (checkpoint format {written_as}, this one reads {FORMAT}). Upgrade polyfed to go on."
        )
    if seal != _seal(manifest):
        raise Damaged(f"{path} is damaged (its seal does not match).")
    if not isinstance(manifest.get("notes"), dict):
        raise Damaged(f"{path} is damaged (it has no notes).")
    if written_as < FORMAT:
        raise RunFolderError(f"{path} {OLDER}")
    return manifest  # type: ignore[no-any-return]


def newest_notes(folder: Path) -> dict[str, Any]:
    """The notes of the newest whole manifest; empty where there is none."""
    for path in manifest_files(folder):
        with contextlib.suppress(Damaged, KeyError):
            notes = read_manifest(path)["notes"]
            if isinstance(notes, dict):
                return notes
    return {}
