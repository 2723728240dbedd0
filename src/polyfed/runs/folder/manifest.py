"""The manifest of a checkpoint, with the digests of the checkpoint files and of the files around it. Reading it does not need torch.

The digest of the manifest (``seal``) covers both. ``read_manifest`` verifies the manifest, ``problem_of`` the files around it.
"""

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
"""Format of run folders and manifests."""
DOCUMENT, METRICS, NEWCOMER_FILE, ANSWERS_FILE = "run.toml", "metrics.jsonl", "newcomer.safetensors", "answers.safetensors"
"""Files around a checkpoint."""
SEALS = "seals"
"""Checkpoint note with their digests; missing in folders of older versions."""


class Damaged(Exception):
    """A damaged checkpoint file; the previous checkpoint is used."""


def manifest_files(folder: Path) -> list[Path]:
    """Return the manifests in a checkpoint folder, newest first; an unreadable folder is an error, a missing one is empty."""
    try:
        return sorted((path for path in folder.iterdir() if path.match("manifest-*.json")), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(
            f"Cannot read {folder}: {error.strerror or error}. Nothing was changed. Fix its permissions (chmod u+rwx), or restore it "
            "from a backup."
        ) from error


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {**manifest, "seal": digest_of(json.dumps(manifest, sort_keys=True).encode())}


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def require_format(found: int, path: Path, name: str = "format") -> None:
    if found > FORMAT:
        raise RunFolderError(
            f"{path} was written by a newer version of polyfed ({name} {found}; this version reads {FORMAT}). "
            "Upgrade polyfed to continue."
        )
    if found < FORMAT:
        raise RunFolderError(
            f"{path} was written by polyfed 0.1 (format 1), which this version does not read. Open it with polyfed 0.2."
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest and verify its seal."""
    try:
        manifest = json.loads(path.read_bytes())
        seal, written_as = manifest.pop("seal"), operator.index(manifest["format"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({type(error).__name__}).") from error
    if written_as <= FORMAT:
        if seal != sealed(manifest)["seal"]:
            raise Damaged(f"{path} is damaged (its seal does not match).")
        if not isinstance(manifest.get("notes"), dict):
            raise Damaged(f"{path} is damaged (it has no notes).")
    require_format(written_as, path, "checkpoint format")
    return manifest  # type: ignore[no-any-return]


def newest_notes(folder: Path) -> dict[str, Any]:
    """Return the notes of the newest good manifest; empty if there is none."""
    for path in manifest_files(folder):
        with contextlib.suppress(Damaged):
            notes: dict[str, Any] = read_manifest(path)["notes"]
            return notes
    return {}


def problem_of(name: str, content: bytes, notes: Mapping[str, Any]) -> str:
    """Describe how a file around a checkpoint differs from the sealed one; empty if it does not, or if it has no seal.

    The metrics of an unfinished run may have more lines than its checkpoint: they are recomputed when the run is resumed.
    """
    seal = notes.get(SEALS, {}).get(name)
    if seal is None:
        return ""
    size = notes["metrics_size"] if name == METRICS else len(content)
    if len(content) < size:
        return f"lacks lines: it has {len(content)} bytes of {size}"
    if digest_of(content[:size]) != seal:
        return "was changed (its digest does not match the checkpoint)"
    if notes.get("finished") and len(content) > size:
        return f"has {len(content) - size} bytes more than at the end of the run"
    return ""
