"""Describe a run folder without torch, and without importing any code that it names."""

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


def inspect_run(path: str | Path) -> dict[str, Any]:
    """Return the settings, method, data, checkpoint, files with sizes, named code, and author of a run folder."""
    folder = Path(path)
    document_file = folder / "run.toml"
    try:
        content = document_file.read_bytes()
        document = tomllib.loads(content.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RunFolderError(f"Cannot read {document_file}: {getattr(error, 'strerror', None) or error}.") from error
    settings = _table_of(document, "settings")
    try:
        checkpoint, problems = _describe_checkpoint(folder / "checkpoint")
    except RunFolderError as error:
        checkpoint, problems = "unknown", [str(error)]
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    own = is_sealed(content)
    return {
        "run": str(folder),
        "written_by": "this account"
        if own
        else "another account, or changed since, or written without a key: its code needs --trust",
        "is_own": own,
        "method": str(_table_of(document, "method").get("text", settings.get("method", "?"))),
        "data": str(_table_of(document, "data").get("name", settings.get("data", "?"))),
        "given_in_python": ", ".join(map(str, document.get("given_in_python") or [])) or "nothing",
        "checkpoint": checkpoint,
        "metrics": f"{lines} lines" if metrics.is_file() else "none",
        "code": _named_code(settings, document),
        "problems": problems,
        "settings": dict(settings),
        "files": _file_sizes(folder),
    }


def _table_of(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _named_code(settings: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    """Describe the code that the folder names, and how it would be used."""
    load = settings.get("load")
    files = [file for file in load if isinstance(file, str)] if isinstance(load, list) else []
    models = [settings.get("model"), _table_of(document, "outline").get("default_model")]
    named = code_in(files) + [code for model in models if isinstance(model, str) for code in code_in(model=model)]
    return [f"{code.setting} = {code.text}: would {code.words}" for code in dict.fromkeys(named)]


def _describe_checkpoint(folder: Path) -> tuple[str, list[str]]:
    """Describe the newest good manifest, and the problems of newer ones."""
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
            problems.append(f"{path} is not a valid manifest ({type(error).__name__}).")
    return "none", problems


def _file_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes in bytes of the first ``MAX_FILES`` files."""
    found: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[str(path.relative_to(folder))] = path.stat().st_size
        if len(found) == MAX_FILES:
            break
    return found
