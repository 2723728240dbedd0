"""What a run folder contains, found without importing anything that it names, and without torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import RunFolderError
from polyfed.runs.folder.account_key import is_sealed
from polyfed.runs.folder.manifest import Damaged, manifest_files, read_manifest
from polyfed.trust import code_in

MAX_FILES = 1000


def inspected(path: str | Path) -> dict[str, Any]:
    """What a run folder says and holds.

    Args:
        path: the run folder.

    Returns:
        Its settings, method, data, rounds, checkpoint, files with their sizes, the code it names, and who wrote it.
    """
    folder = Path(path)
    content, document = _read_document(folder)
    settings = _table_of(document, "settings")
    try:
        checkpoint, problems = _checkpoint_words(folder / "checkpoint")
    except RunFolderError as error:
        checkpoint, problems = "unknown", [str(error)]
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    own = is_sealed(content)
    code = _named_code(settings, document)
    return {
        "run": str(folder),
        "written_by": "this account" if own else "somebody else, or changed since, or without a key: its code needs --trust",
        "is_own": own,
        "method": str(_table_of(document, "method").get("text", settings.get("method", "?"))),
        "data": str(_table_of(document, "data").get("name", settings.get("data", "?"))),
        "given_in_python": ", ".join(map(str, document.get("given_in_python") or [])) or "nothing",
        "checkpoint": checkpoint,
        "metrics": f"{lines} lines" if metrics.is_file() else "none",
        "code": code,
        "problems": problems,
        "settings": dict(settings),
        "files": _sizes_of(folder),
    }


def _read_document(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """``run.toml`` as it lies there, and what it says."""
    path = folder / "run.toml"
    try:
        content = path.read_bytes()
        return content, tomllib.loads(content.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RunFolderError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _table_of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of the document; empty where it is something else."""
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _named_code(settings: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """What code the folder names, and what would be done with it."""
    load = settings.get("load")
    files = [file for file in load if isinstance(file, str)] if isinstance(load, list) else []
    models = [settings.get("model"), _table_of(document, "outline").get("default_model")]
    named = code_in(files) + [code for model in models if isinstance(model, str) for code in code_in(model=model)]
    return [f"{code.setting} = {code.text}: would {code.words}" for code in dict.fromkeys(named)]


def _checkpoint_words(folder: Path) -> tuple[str, list[str]]:
    """How far the newest whole manifest says the run has come, and what is wrong with newer ones."""
    problems: list[str] = []
    for path in manifest_files(folder):
        try:
            manifest = read_manifest(path)
            files = [name for name in manifest["digests"] if not (folder / name).is_file()]
            problems += [f"{folder / name} is missing." for name in files]
            end = "finished" if manifest["notes"].get("finished") else "not finished"
            return f"round {manifest['round']}, {end}, {len(manifest['clients'])} client states ({path.name})", problems
        except (Damaged, RunFolderError) as error:
            problems.append(str(error))
        except (KeyError, AttributeError, TypeError) as error:
            problems.append(f"{path} is no manifest ({type(error).__name__}).")
    return "none", problems


def _sizes_of(folder: Path) -> dict[str, int]:
    """Bytes of the files in the folder, by their names; the first ones where there are very many."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = path.stat().st_size
        if len(found) == MAX_FILES:
            break
    return found
