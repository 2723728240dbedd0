"""The run folder: ``run.toml``, ``metrics.jsonl``, ``checkpoint/``, ``best/`` for a chosen round, and ``lock`` during training."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.core.method import read_recorded
from polyfed.data.federation_summary import RecordedInputs, differences
from polyfed.errors import DataError, RunFolderError
from polyfed.runs.folder.account_key import is_sealed, sealed
from polyfed.runs.folder.atomic_write import write_atomically
from polyfed.runs.folder.checkpoint import Checkpoints, Snapshot
from polyfed.runs.folder.lock import hold_lock
from polyfed.runs.folder.manifest import (
    ANSWERS_FILE,
    DOCUMENT,
    FORMAT,
    METRICS,
    NEWCOMER_FILE,
    SEALS,
    digest_of,
    newest_notes,
    problem_of,
    require_format,
)
from polyfed.runs.folder.paths import anchored
from polyfed.settings import Settings
from polyfed.trust import NOTHING, Trust, code_in

log = logging.getLogger("polyfed")

HELD_BY_NODES = "data held by nodes"
"""Entry of ``given_in_python`` for a Flower run, whose server never had the data."""


class RunFolder:
    """Reads and writes the folder of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.document_file, self.metrics_file = self.path / DOCUMENT, self.path / METRICS
        self.checkpoints = Checkpoints(self.path / "checkpoint")
        self.best = Checkpoints(self.path / "best")
        self.is_locked = False
        self.written_document = b""
        self.written_metrics: tuple[int, Any] | None = None
        self.verified_document: bytes | None = None

    @property
    def holds_run(self) -> bool:
        return self.document_file.exists()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the folder, and create it if it is missing."""
        if self.is_locked:
            yield
            return
        with contextlib.ExitStack() as stack:
            with self.writing():
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold_lock(self.path))
            self.is_locked = True
            try:
                yield
            finally:
                self.is_locked = False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except RunFolderError:
            raise
        except OSError as error:
            raise RunFolderError(f"Cannot write a run to {self.path}: {error.strerror or error}. Choose another --out.") from error

    def create(self, settings: Settings, facts: Mapping[str, Any]) -> None:
        """Create the folder and write ``run.toml``.

        Raises:
            RunFolderError: If the folder already contains a run.
        """
        self.refuse_to_overwrite()
        settings = anchored(settings, facts.get("given_in_python", ()))
        document = {"format": FORMAT, "settings": settings.to_dict(), **facts, "made_with": versions()}
        text = sealed(tomli_w.dumps(_without_none(document)))
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self.metrics_file.touch()
            write_atomically(self.document_file, text)

    def refuse_to_overwrite(self) -> None:
        if self.holds_run:
            raise RunFolderError(
                f"{self.path} already contains a run. Resume it (polyfed resume {self.path}), or choose another --out."
            )

    def document(self) -> dict[str, Any]:
        """Read ``run.toml``, and verify that it is the one that belongs to the newest checkpoint."""
        path = self.document_file
        if not path.is_file():
            raise RunFolderError(f"{self.path} is not a run folder: {explain_missing(self.path)}")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunFolderError(f"Cannot read {path}: {error}.") from error
        if content != self.verified_document and problem_of(DOCUMENT, content, newest_notes(self.checkpoints.folder)):
            raise RunFolderError(
                f"{path} was changed after the run started (its digest does not match the checkpoint). Restore it from a backup, "
                "or start another run: its settings can be used with --recipe, its state with --init."
            )
        self.verified_document = content
        try:
            document = tomllib.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise RunFolderError(f"Cannot read {path}: {error}.") from error
        require_format(document.get("format", 1), path)
        return _with_current_options(document)

    def settings(self) -> Settings:
        return Settings.from_dict(self.document().get("settings", {}), str(self.document_file))

    def trust(self, trusted: bool = False) -> Trust:
        """Trust all code that ``run.toml`` names, if this account wrote the file or the user trusts it."""
        settings, outline = self.settings(), self.document().get("outline")
        default = outline.get("default_model") if isinstance(outline, Mapping) else None
        code = code_in(settings.load, settings.model) + code_in(model=default if isinstance(default, str) else None)
        if trusted or (code and is_sealed(self.document_file.read_bytes())):
            return NOTHING.adding(code)
        return NOTHING.refusing(code, str(self.document_file))

    def resumed_settings(self) -> Settings:
        """Return the settings with all method options written out, so that changed defaults do not change the run."""
        document, settings = self.document(), self.settings()
        spelled_out = document.get("method", {}).get("all_options")
        if spelled_out is None or "method" in document.get("given_in_python", []):
            return settings
        return dataclasses.replace(settings, method=spelled_out)

    def require_objects(self, given: Mapping[str, Any]) -> None:
        """Raise an error if an object that the run was given in Python is missing."""
        objects = self.document().get("given_in_python", [])
        if HELD_BY_NODES in objects and "data" in given and given["data"] is None:
            raise DataError(
                f"{self.path} was trained by Flower nodes, which hold the data. Resume it there (flwr run APP --run-config "
                f"'out=\"{self.path}\"'), or score it on other data (polyfed evaluate {self.path} DATA)."
            )
        missing = [name for name in objects if name in given and given[name] is None]
        if missing:
            arguments = ", ".join(f"{name}=..." for name in missing)
            raise RunFolderError(
                f"{self.path} was trained with {' and '.join(missing)} given in Python. "
                f"Open it in Python with the same objects: polyfed.resume({str(self.path)!r}, {arguments})."
            )

    def other_data(self, identity: Mapping[str, Any]) -> list[str]:
        """Describe how data differs from that of the run; ``identity`` comes from ``FederationSummary.identity``."""
        recorded = self.recorded_inputs()
        inputs = {} if recorded is None else recorded.as_plain()
        return differences(inputs | self.document().get("data", {}), identity)

    def recorded_inputs(self) -> RecordedInputs | None:
        """Return the shape and normalisation of the inputs; None if ``run.toml`` does not record them."""
        document = self.document()
        try:
            return RecordedInputs.read(document.get("outline") or document.get("data") or {})
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RunFolderError(
                f"The description of the inputs in {self.document_file} is damaged ({type(error).__name__}: {error}). "
                "Restore the file from a backup."
            ) from error

    def require_data(self, identity: Mapping[str, Any]) -> None:
        other = self.other_data(identity)
        if other:
            raise RunFolderError(
                f"The data of {self.path} has changed since the run was started: {'; '.join(other)}. "
                "Restore the original data, or start a new run in another folder."
            )

    def begin_sealing(self) -> None:
        """Start to hash all metrics that this process writes, for the next checkpoint to seal."""
        try:
            self.written_document = self.document_file.read_bytes()
            content = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        except OSError as error:
            raise RunFolderError(f"Cannot read {error.filename}: {error.strerror or error}.") from error
        self.written_metrics = len(content), hashlib.sha256(content)

    def seals(self) -> dict[str, Any]:
        """Return the digests of the files around a checkpoint; a lost ``run.toml`` is restored, lost metrics are an error."""
        assert self.written_metrics is not None
        path, (size, digest) = self.document_file, self.written_metrics
        if not path.is_file() or path.read_bytes() != self.written_document:
            log.warning("%s was deleted or changed during training. Writing it again.", path)
            with self.writing():
                write_atomically(path, self.written_document)
        found = self.metrics_size()
        if found != size or not self.metrics_file.exists():
            raise RunFolderError(
                f"{self.metrics_file} was deleted or changed during training: it has {found} bytes, and {size} were written. "
                f"The last good checkpoint is untouched. Restore the file from a backup and resume (polyfed resume {self.path}), or "
                f"start another run from its state (--init {self.path})."
            )
        final_files = [self.path / name for name in (NEWCOMER_FILE, ANSWERS_FILE)]
        digests = {file.name: digest_of(file.read_bytes()) for file in final_files if file.is_file()}
        return {
            "metrics_size": size,
            SEALS: {DOCUMENT: digest_of(self.written_document), METRICS: digest.hexdigest(), **digests},
        }

    def require_sealed(self, name: str, notes: Mapping[str, Any]) -> None:
        """Raise an error if a file that the checkpoint with these notes sealed is missing or changed."""
        path = self.path / name
        if name not in notes.get(SEALS, {}):
            return
        try:
            problem = problem_of(name, path.read_bytes(), notes)
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
        if problem and name == METRICS:
            raise RunFolderError(
                f"{path} {problem}. Nothing was changed. Restore it from a backup, or start another run from its state "
                f"(--init {self.path})."
            )
        if problem:
            raise RunFolderError(
                f"{path} is missing or was changed (its digest does not match the checkpoint). Restore it from a backup."
            )

    def read(self) -> tuple[Snapshot | None, list[str]]:
        """Read the newest good checkpoint.

        Returns:
            The checkpoint, or None if there is none, and a message for each damaged one that was skipped.

        Raises:
            RunFolderError: If there are metrics but no checkpoint; metrics are only written after the first checkpoint.
        """
        snapshot, complaints = self.checkpoints.read()
        if snapshot is not None:
            self.require_sealed(METRICS, snapshot.notes)
        elif self.metrics_size() and not complaints:
            raise RunFolderError(
                f"{self.metrics_file} contains scores, but {self.checkpoints.folder} has no readable checkpoint. Nothing was changed. "
                f"Restore {self.checkpoints.folder} from a backup. To train from the start, remove {self.metrics_file} and resume, "
                "or use another --out."
            )
        return snapshot, complaints

    def append(self, lines: list[Mapping[str, Any]]) -> None:
        try:
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            with self.metrics_file.open("ab") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunFolderError(
                f"Cannot write to {self.metrics_file}: {error.strerror or error}. Everything saved before is kept."
            ) from error
        if self.written_metrics is not None:
            size, digest = self.written_metrics
            digest.update(content)
            self.written_metrics = size + len(content), digest

    def sealed_lines(self, notes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the metrics that the checkpoint with these notes seals; all of them in folders of older versions, without seals.

        Later lines cannot be verified, and are recomputed when the run is resumed.
        """
        return self.metrics(notes["metrics_size"] if METRICS in notes.get(SEALS, {}) else None)

    def metrics(self, size: int | None = None) -> list[dict[str, Any]]:
        """Return all metrics, or those in the first ``size`` bytes, without an incomplete last line of a killed run."""
        try:
            texts = self.metrics_file.read_bytes()[:size].splitlines(keepends=True) if self.metrics_file.exists() else []
        except OSError as error:
            raise RunFolderError(f"Cannot read {self.metrics_file}: {error.strerror or error}.") from error
        if texts and not texts[-1].endswith(b"\n"):
            texts.pop()
        return [self._metrics_line(number, text) for number, text in enumerate(texts, 1)]

    def _metrics_line(self, number: int, text: bytes) -> dict[str, Any]:
        try:
            line: dict[str, Any] = json.loads(text)
            if not {"round", "view", "client"} <= set(line) or ("count" in line and "domain" not in line):
                raise ValueError("round, view, client or domain is missing")
        except (ValueError, TypeError, RecursionError) as error:
            raise RunFolderError(f"{self.metrics_file}: line {number} is not a valid metrics line ({error}).") from error
        return line

    def metrics_size(self) -> int:
        return self.metrics_file.stat().st_size if self.metrics_file.exists() else 0

    def truncate_metrics(self, size: int) -> bool:
        """Remove lines written after a checkpoint; return False if lines before it are missing."""
        if self.metrics_size() <= size:
            return self.metrics_size() == size
        with self.metrics_file.open("a+b") as file:
            file.truncate(size)
        return True


def _with_current_options(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with its method in the current notation, with the options that the run had."""
    if "method" in document.get("given_in_python", ()):
        return document
    for table, key in (("settings", "method"), ("method", "text"), ("method", "all_options")):
        if isinstance(document.get(table), dict) and isinstance(text := document[table].get(key), str):
            document[table][key] = read_recorded(text)
    return document


def _without_none(tree: Any) -> Any:
    """Remove None, which TOML cannot represent."""
    if isinstance(tree, Mapping):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return tree


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, and the machine."""
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for package in ("polyfed", "torch", "torchvision", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _commit() -> str:
    """Return the commit of the checkout that polyfed runs from; empty outside a checkout."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)

    try:
        if git("ls-files", "--error-unmatch", __file__).returncode != 0:
            return ""
        commit, changes = git("rev-parse", "HEAD").stdout.strip(), git("status", "--porcelain", "-uno").stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return commit + ("+changes" if changes else "")


def explain_missing(path: Path) -> str:
    return "it has no run.toml. Pass a folder that polyfed run has written." if path.exists() else "it does not exist."
