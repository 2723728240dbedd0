"""A run is a folder: ``run.toml`` (resolved), ``metrics.jsonl``, ``checkpoint/``, ``best/`` for a chosen round, ``lock`` while it is trained."""

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
"""What ``given_in_python`` says of a run over Flower, whose data its server never had."""


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
        """Nobody else writes to the folder inside the block; it is made where it is missing."""
        if self.is_locked:
            yield
            return
        with contextlib.ExitStack() as until_the_end:
            with self.writing():
                self.path.mkdir(parents=True, exist_ok=True)
                until_the_end.enter_context(hold_lock(self.path))
            self.is_locked = True
            try:
                yield
            finally:
                self.is_locked = False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Say in a sentence that nothing can be written here."""
        try:
            yield
        except RunFolderError:
            raise
        except OSError as error:
            raise RunFolderError(f"Cannot write a run to {self.path}: {error.strerror or error}. Choose another --out.") from error

    def create(self, settings: Settings, facts: Mapping[str, Any]) -> None:
        """Make the folder and write down what is run; a folder that holds a run already is refused."""
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
                f"{self.path} holds a run already. Go on with it (polyfed resume {self.path}) or choose another --out."
            )

    def document(self) -> dict[str, Any]:
        """What ``run.toml`` says, if it is the one that the newest checkpoint was made with."""
        path = self.document_file
        if not path.is_file():
            raise RunFolderError(f"{self.path} is not a run: {missing_words(self.path)}")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error}.") from error
        if content != self.verified_document and problem_of(DOCUMENT, content, newest_notes(self.checkpoints.folder)):
            raise RunFolderError(
                f"{path} was changed after the run had begun (its digest does not match the checkpoint). Put back a copy, "
                "or begin another run: its settings can be used with --recipe, its state with --init."
            )
        self.verified_document = content
        try:
            document = tomllib.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise RunFolderError(f"{path} cannot be read: {error}.") from error
        require_format(document.get("format", 1), path)
        return _with_all_options(document)

    def settings(self) -> Settings:
        return Settings.from_dict(self.document().get("settings", {}), str(self.document_file))

    def trust(self, trusted: bool = False) -> Trust:
        """The code that ``run.toml`` names, wherever it does, if this account wrote it or the user trusts it."""
        settings, outline = self.settings(), self.document().get("outline")
        default = outline.get("default_model") if isinstance(outline, Mapping) else None
        code = code_in(settings.load, settings.model) + code_in(model=default if isinstance(default, str) else None)
        if trusted or (code and is_sealed(self.document_file.read_bytes())):
            return NOTHING.adding(code)
        return NOTHING.refusing(code, str(self.document_file))

    def settings_to_go_on(self) -> Settings:
        """The settings of the run, with every option of its method as it was, should a default have changed since."""
        document, settings = self.document(), self.settings()
        spelled_out = document.get("method", {}).get("all_options")
        if spelled_out is None or "method" in document.get("given_in_python", []):
            return settings
        return dataclasses.replace(settings, method=spelled_out)

    def require_objects(self, given: Mapping[str, Any]) -> None:
        """Refuse to go on without what the run was given in Python: their names could stand for something else."""
        objects = self.document().get("given_in_python", [])
        if HELD_BY_NODES in objects and "data" in given and given["data"] is None:
            raise DataError(
                f"{self.path} was trained by Flower nodes, which hold the data. Go on with it there (flwr run APP --run-config "
                f"'out=\"{self.path}\"'), or score it on other data (polyfed evaluate {self.path} DATA)."
            )
        missing = [name for name in objects if name in given and given[name] is None]
        if missing:
            again = ", ".join(f"{name}=..." for name in missing)
            raise RunFolderError(
                f"{self.path} was trained with {' and '.join(missing)} given in Python. "
                f"Open it there, with the same: polyfed.resume({str(self.path)!r}, {again})."
            )

    def other_data(self, found: Mapping[str, Any]) -> list[str]:
        """In what the data found differ from those of the run, in words; ``found`` is what ``FederationSummary.identity`` says."""
        recorded = self.recorded_inputs()
        inputs = {} if recorded is None else recorded.as_plain()
        return differences(inputs | self.document().get("data", {}), found)

    def recorded_inputs(self) -> RecordedInputs | None:
        """The shape and normalisation of the inputs that the run was begun with; None where ``run.toml`` does not say."""
        document = self.document()
        try:
            return RecordedInputs.read(document.get("outline") or document.get("data") or {})
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RunFolderError(
                f"{self.document_file} is damaged where it describes inputs ({type(error).__name__}: {error}). Put back a copy of the file."
            ) from error

    def require_data(self, found: Mapping[str, Any]) -> None:
        """Refuse to go on with other data than the run was begun with."""
        other = self.other_data(found)
        if other:
            raise RunFolderError(
                f"{self.path} was begun with other data than there are now: {'; '.join(other)}. "
                "Give it its own data again, or start a new run in another folder."
            )

    def begin_sealing(self) -> None:
        """From now on this process writes to the folder: what it writes is hashed on the way, for the next checkpoint to seal."""
        try:
            self.written_document = self.document_file.read_bytes()
            content = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        except OSError as error:
            raise RunFolderError(f"{error.filename} cannot be read: {error.strerror or error}.") from error
        self.written_metrics = len(content), hashlib.sha256(content)

    def seals(self) -> dict[str, Any]:
        """What a checkpoint notes of the files around it. A lost ``run.toml`` is written again; lost metrics end the run."""
        assert self.written_metrics is not None
        path, (size, digest) = self.document_file, self.written_metrics
        if not path.is_file() or path.read_bytes() != self.written_document:
            log.warning("%s was deleted or changed while the run was trained; it is written again.", path)
            with self.writing():
                write_atomically(path, self.written_document)
        found = self.metrics_size()
        if found != size or not self.metrics_file.exists():
            raise RunFolderError(
                f"{self.metrics_file} was deleted or changed while the run was trained: it has {found} bytes, and {size} were written. "
                f"The last good checkpoint is untouched. Put back a copy and go on (polyfed resume {self.path}), or begin another run "
                f"from its state (--init {self.path})."
            )
        left = [self.path / name for name in (NEWCOMER_FILE, ANSWERS_FILE)]
        digests = {file.name: digest_of(file.read_bytes()) for file in left if file.is_file()}
        return {
            "metrics_size": size,
            SEALS: {DOCUMENT: digest_of(self.written_document), METRICS: digest.hexdigest(), **digests},
        }

    def require_sealed(self, name: str, notes: Mapping[str, Any]) -> None:
        """Refuse a file that is missing, or not the one that a checkpoint was made with; ``notes`` are the checkpoint's."""
        path = self.path / name
        if name not in notes.get(SEALS, {}):
            return
        try:
            problem = problem_of(name, path.read_bytes(), notes)
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
        if problem and name == METRICS:
            raise RunFolderError(
                f"{path} {problem}. Nothing was changed. Put back a copy; or begin another run from its state (--init {self.path})."
            )
        if problem:
            raise RunFolderError(f"{path} is missing or was changed (its digest does not match the checkpoint). Put back a copy.")

    def read(self) -> tuple[Snapshot | None, list[str]]:
        """The newest good checkpoint, with the files that belong to it as they were, and a sentence for each damaged one passed over.

        Metrics without any checkpoint are refused: lines are only written after the first checkpoint.
        """
        snapshot, complaints = self.checkpoints.read()
        if snapshot is not None:
            self.require_sealed(METRICS, snapshot.notes)
        elif self.metrics_size() and not complaints:
            raise RunFolderError(
                f"{self.metrics_file} holds scores, but {self.checkpoints.folder} has no checkpoint that can be read. Nothing was changed. "
                f"Put the folder back; or, to train from the start, remove {self.metrics_file} and resume, or use another --out."
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
                f"Cannot write to {self.metrics_file}: {error.strerror or error}. What was saved before is kept."
            ) from error
        if self.written_metrics is not None:
            size, digest = self.written_metrics
            digest.update(content)
            self.written_metrics = size + len(content), digest

    def sealed_lines(self, notes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The lines of metrics that a checkpoint seals.

        Later ones are recomputed when the run goes on, and nothing tells whether they are as they were written. Folders of older
        versions have no seal: all their lines.

        Args:
            notes: of the checkpoint, which ``read`` has compared with the file.
        """
        return self.metrics(notes["metrics_size"] if METRICS in notes.get(SEALS, {}) else None)

    def metrics(self, size: int | None = None) -> list[dict[str, Any]]:
        """All lines of metrics; a last one that a killed run left torn is passed over, and recomputed when the run goes on.

        Args:
            size: bytes of the file to read; all by default.
        """
        try:
            texts = self.metrics_file.read_bytes()[:size].splitlines(keepends=True) if self.metrics_file.exists() else []
        except OSError as error:
            raise RunFolderError(f"{self.metrics_file} cannot be read: {error.strerror or error}.") from error
        if texts and not texts[-1].endswith(b"\n"):
            texts.pop()
        return [self._metrics_line(number, text) for number, text in enumerate(texts, 1)]

    def _metrics_line(self, number: int, text: bytes) -> dict[str, Any]:
        try:
            line: dict[str, Any] = json.loads(text)
            if not {"round", "view", "client"} <= set(line) or ("count" in line and "domain" not in line):
                raise ValueError("it does not say its round, view, client and domain")
        except (ValueError, TypeError, RecursionError) as error:
            raise RunFolderError(f"{self.metrics_file}, line {number}, is no line of metrics ({error}).") from error
        return line

    def metrics_size(self) -> int:
        return self.metrics_file.stat().st_size if self.metrics_file.exists() else 0

    def truncate_metrics(self, size: int) -> bool:
        """Forget lines written after a checkpoint; says whether all lines up to it are there."""
        if self.metrics_size() <= size:
            return self.metrics_size() == size
        with self.metrics_file.open("a+b") as file:
            file.truncate(size)
        return True


def _with_all_options(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with its method written as it was run, if methods got options since."""
    if "method" in document.get("given_in_python", ()):
        return document
    for table, key in (("settings", "method"), ("method", "text"), ("method", "all_options")):
        if isinstance(document.get(table), dict) and isinstance(text := document[table].get(key), str):
            document[table][key] = read_recorded(text)
    return document


def _without_none(tree: Any) -> Any:
    """The tree without empty values, which TOML cannot write."""
    if isinstance(tree, Mapping):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return tree


def versions() -> dict[str, str]:
    """Versions of what a result depends on, and the machine."""
    found = {"python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    for package in ("polyfed", "torch", "torchvision", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _commit() -> str:
    """The commit of the checkout polyfed runs from; empty outside a checkout."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(Path(__file__).resolve().parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)

    try:
        if git("ls-files", "--error-unmatch", __file__).returncode != 0:
            return ""
        commit, changes = git("rev-parse", "HEAD").stdout.strip(), git("status", "--porcelain", "-uno").stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return commit + ("+changes" if changes else "")


def missing_words(path: Path) -> str:
    return "it has no run.toml. Give a folder that polyfed run has written." if path.exists() else "there is no such folder."
