"""The answer for each test image as a file of the run folder: label, answer and confidence, no image.

It is written where the tests are on this machine, and lets reports compare two runs image by image and show the most confident mistakes.
Clients elsewhere (Flower nodes) send counts only; worker processes keep their answers to themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from polyfed.core.trees import packed, unpacked
from polyfed.errors import RunFolderError
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.run_folder import ANSWERS_FILE as FILE
from polyfed.runs.folder.run_folder import RunFolder

Answers = Mapping[tuple[str, str, str], Mapping[str, Tensor]]
"""``labels``, ``answers`` and ``confidence`` of the test images, by view, client and domain."""


def write_answers(folder: Path, found: Answers) -> None:
    """Write the answers of the last evaluation; without any, no file."""
    if found:
        rows = [{"view": view, "client": client, "domain": domain, **one} for (view, client, domain), one in found.items()]
        try:
            write_atomically(folder / FILE, packed(rows))
        except OSError as error:
            raise RunFolderError(f"Cannot write {folder / FILE}: {error.strerror or error}.") from error


def read_answers(folder: RunFolder, notes: Mapping[str, Any]) -> Answers:
    """The answers that a finished run left; nothing where it left none.

    Args:
        folder: the run folder.
        notes: of its last checkpoint, with the seal of the file.
    """
    folder.require_sealed(FILE, notes)
    path = folder.path / FILE
    if not path.is_file() or not notes.get("finished"):
        return {}
    try:
        rows = unpacked(path.read_bytes())
        return {
            (row["view"], row["client"], row["domain"]): {name: row[name] for name in ("labels", "answers", "confidence")}
            for row in rows
        }
    except Exception as error:
        raise RunFolderError(f"{path} cannot be read ({type(error).__name__}). Put back a copy, or remove it.") from error
