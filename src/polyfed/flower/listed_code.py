"""Code that travels with an app runs only at nodes that list its hash: ``--node-config 'code="SHA-256 SHA-256"'``.

It imports nothing of the app. Files of methods (``load``) and a model by ``module:function`` are looked at; what is installed on the node
needs no listing, since it did not travel.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from polyfed.core.code_gate import names_function
from polyfed.settings import Settings

CODE = "code"


def problem_with_code(settings: Settings, config: Mapping[str, object]) -> str:
    """Why a node does not run what an app brings; empty where it may.

    Args:
        settings: of the run; ``load`` names files where they lie on this machine.
        config: the node's own configuration.
    """
    listed = set(str(config.get(CODE, "")).replace(",", " ").lower().split())
    for file in travelled(settings):
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found not in listed:
            return (
                f"This node does not list the code in {file.name} (SHA-256 {found}). Read the file; to let it run, start the node with "
                f"--node-config '{CODE}=\"{found}\"'."
            )
    return ""


def travelled(settings: Settings) -> Iterator[Path]:
    """The files of code that came with the app."""
    yield from map(Path, settings.load)
    if settings.model is not None and names_function(settings.model):
        yield from files_of(settings.model.partition(":")[0].partition(".")[0])


def files_of(module: str) -> Iterator[Path]:
    """The files of a module or package that is not installed here."""
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = Path(__file__).resolve().parents[2]
    for place in filter(None, sys.path):
        folder = Path(place).resolve()
        found = [path for path in (folder / f"{module}.py", *sorted((folder / module).rglob("*.py"))) if path.is_file()]
        if found:
            if folder not in (*installed, own):
                yield from found
            return
