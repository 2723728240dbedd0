"""The manifest of a checkpoint: its files with their digests, and the digests of the files around it. Read without torch.

Its own digest (``seal``) covers both. ``read_manifest`` verifies the manifest, ``problem_of`` everything that it vouches for.
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
"""Of run folders and their manifests."""
DOCUMENT, METRICS, NEWCOMER_FILE, ANSWERS_FILE = "run.toml", "metrics.jsonl", "newcomer.safetensors", "answers.safetensors"
"""The files around a checkpoint."""
SEALS = "seals"
"""The note of a checkpoint with their digests. Older versions wrote none."""


class Damaged(Exception):
    """A checkpoint file that cannot be trusted; the one before it is tried."""


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


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with a digest of itself."""
    return {**manifest, "seal": digest_of(json.dumps(manifest, sort_keys=True).encode())}


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def require_format(found: int, path: Path, what: str = "format") -> None:
    """Refuse a file of a newer version, or of one that is not read any more."""
    if found > FORMAT:
        raise RunFolderError(
            f"{path} was written by a newer polyfed ({what} {found}, this one reads {FORMAT}). Upgrade polyfed to go on."
        )
    if found < FORMAT:
        raise RunFolderError(
            f"{path} was written by polyfed 0.1 (format 1), which this version does not read. Open it with polyfed 0.2."
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest whose seal is whole."""
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
    """The notes of the newest whole manifest; empty where there is none."""
    for path in manifest_files(folder):
        with contextlib.suppress(Damaged):
            notes: dict[str, Any] = read_manifest(path)["notes"]
            return notes
    return {}


def problem_of(name: str, content: bytes, notes: Mapping[str, Any]) -> str:
    """Return why a file around a checkpoint is not the one that it seals; empty if it is, or if nothing seals it.

    Metrics may have more lines than the checkpoint of an unfinished run knows: they are recomputed when the run goes on.
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
        return f"has {len(content) - size} bytes more than the run had at its end"
    return ""
