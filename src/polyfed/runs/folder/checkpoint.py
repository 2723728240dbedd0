"""Checkpoints: safetensors files and a manifest that is renamed last, without pickle.

The manifest ``manifest-<round>.json`` lists the files with their digests. Files are written atomically and never changed. Only clients
that changed since the last checkpoint are written. The last two good checkpoints are kept, in case the newest one is damaged.

The content is first collected in a ``Draft``. A ``detached`` draft can be written by another thread while the next round trains.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from polyfed.core.workbench import ClientState, client_digest
from polyfed.errors import MAX_NAMED, RunFolderError
from polyfed.runs.folder.atomic_write import sync_folder, write_atomically
from polyfed.runs.folder.manifest import FORMAT, Damaged, digest_of, manifest_files, read_manifest, sealed
from polyfed.trees import Piece, own, pieces, size, tree_digest, unpacked

log = logging.getLogger("polyfed")

KEPT_CHECKPOINTS = 2


@dataclass
class Snapshot:
    """The complete state of a run, from which it can be resumed."""

    round: int
    state: dict[str, Tensor]
    memory: dict[str, Any] = field(default_factory=dict)
    clients: Mapping[str, ClientState] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def copied(snapshot: Snapshot) -> Snapshot:
    """Return a deep copy, which later training cannot change."""
    clients = {client: ClientState(own(state.entries), own(state.memory)) for client, state in snapshot.clients.items()}
    return Snapshot(snapshot.round, own(snapshot.state), own(snapshot.memory), clients, own(snapshot.notes))


class Watched(NamedTuple):
    """A tensor that was not copied, with its version, which reveals changes in place."""

    name: str
    value: Tensor
    version: int


def watch(entries: Mapping[str, Tensor], owner: str, watched: list[Watched]) -> dict[str, Tensor]:
    """Return the entries, and add them to ``watched``; a tensor without a version, or not contiguous, is copied instead."""
    same = dict(entries)
    for name, value in entries.items():
        if value.is_contiguous() and not value.is_inference():
            watched.append(Watched(f"{name!r} {owner}", value, value._version))
        else:
            same[name] = own(value)
    return same


@dataclass(frozen=True)
class Draft:
    """The content of a checkpoint: the server, and the clients to write. The rest of ``all_clients`` keep their files."""

    round: int
    finished: bool
    state: Mapping[str, Tensor]
    memory: Mapping[str, Any]
    clients: Mapping[str, ClientState]
    all_clients: Sequence[str]
    notes: Mapping[str, Any]
    watched: Sequence[Watched] = ()

    def detached(self, state_is_replaced: bool) -> Draft:
        """Return a draft that the next round cannot change.

        Memory is copied, because methods change it in place. Client entries are never changed in place, and neither is the server state
        if ``state_is_replaced``: these tensors are not copied, but checked after they have been written.
        """
        watched: list[Watched] = []
        state = watch(self.state, "of the server", watched) if state_is_replaced else own(self.state)
        clients = {
            client: ClientState(watch(found.entries, f"of client {client}", watched), own(found.memory))
            for client, found in self.clients.items()
        }
        return replace(self, state=state, memory=own(self.memory), clients=clients, notes=own(self.notes), watched=watched)

    @property
    def copied_bytes(self) -> int:
        of_clients = sum(size(state.entries) + size(state.memory) for state in self.clients.values())
        return size(self.state) + size(self.memory) + of_clients - sum(watched.value.nbytes for watched in self.watched)

    def require_unchanged(self) -> None:
        for name, value, version in self.watched:
            if value._version != version:
                raise RunFolderError(
                    f"{name} was changed in place while the checkpoint of round {self.round} was written. Replace the tensor instead "
                    "(server.state = server.state | {name: value}). The last good checkpoint is untouched."
                )


class Checkpoints:
    """Reads and writes checkpoints in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client_files: dict[str, str] = {}
        self.digests: dict[str, str] = {}

    def write(self, snapshot: Snapshot, changed: set[str], finished: bool = False) -> None:
        """Write a checkpoint immediately; unchanged clients keep their files."""
        self.write_draft(self.draft(snapshot, changed, finished))

    def draft(self, snapshot: Snapshot, changed: set[str], finished: bool = False) -> Draft:
        """Return the content to write. It refers to the values of the snapshot, not to copies."""
        existing = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        lost = set(self.digests) - existing
        for name in sorted(lost)[:MAX_NAMED]:
            log.warning("%s was deleted during training. Writing its content again.", self.folder / name)
        kept = {client for client, name in self.client_files.items() if name not in lost}
        due = {client: snapshot.clients[client] for client in sorted(changed | (set(snapshot.clients) - kept))}
        return Draft(snapshot.round, finished, snapshot.state, snapshot.memory, due, list(snapshot.clients), snapshot.notes)

    def write_draft(self, draft: Draft) -> None:
        """Write all files, the manifest last."""
        stamp = f"{draft.round:06d}{'_final' if draft.finished else ''}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            server, manifest = f"server-{stamp}.safetensors", f"manifest-{stamp}.json"
            self._write_file(server, pieces({"state": draft.state, "memory": draft.memory}))
            for client, state in draft.clients.items():
                name = f"client-{hashlib.sha256(client.encode()).hexdigest()[:16]}-{stamp}.safetensors"
                self._write_file(name, pieces({"entries": state.entries, "memory": state.memory}))
                self.client_files[client] = name
            draft.require_unchanged()
            self.client_files = {client: self.client_files[client] for client in draft.all_clients}
            content = {
                "format": FORMAT,
                "round": draft.round,
                "server": server,
                "clients": self.client_files,
                "digests": {name: self.digests[name] for name in sorted({server, *self.client_files.values()})},
                "notes": draft.notes,
            }
            sync_folder(self.folder)  # the files must be durable before the manifest
            self._write_file(manifest, [json.dumps(sealed(content), indent=1).encode()], sync=True)
            self._tidy(manifest)
        except OSError as error:
            raise RunFolderError(
                f"Cannot write a checkpoint to {self.folder}: {error.strerror or error}. The last good checkpoint is untouched."
            ) from error

    def _write_file(self, name: str, data: Sequence[Piece], sync: bool = False) -> None:
        self.digests[name] = write_atomically(self.folder / name, data, sync)

    def _tidy(self, newest: str) -> None:
        """Remove files that the last two checkpoints do not use, and damaged checkpoints later than the newest."""
        used: set[str] = set()
        good = 0
        for path in manifest_files(self.folder):
            if path.name > newest or good == KEPT_CHECKPOINTS:
                continue
            with contextlib.suppress(Damaged):
                used |= {path.name, *read_manifest(path)["digests"]}
                good += 1
        for path in self.folder.iterdir():
            if path.name not in used and path.suffix in (".safetensors", ".json", ".part"):
                path.unlink(missing_ok=True)
        self.digests = {name: digest for name, digest in self.digests.items() if name in used}

    def read(self) -> tuple[Snapshot | None, list[str]]:
        """Return the newest good checkpoint, and an error message for each damaged one that was skipped."""
        complaints: list[str] = []
        for path in manifest_files(self.folder):
            try:
                manifest = read_manifest(path)
                return self._load(manifest), complaints
            except Damaged as damage:
                complaints.append(str(damage))
        return None, complaints

    def read_round(self, number: int) -> Snapshot | None:
        """Return the checkpoint of one round; None if later ones have replaced it.

        Raises:
            Damaged: If the checkpoint is lost for any other reason.
        """
        path = self.folder / f"manifest-{number:06d}.json"
        if not path.exists() and any(later.name > path.name for later in manifest_files(self.folder)):
            return None
        return self._load(read_manifest(path))

    def _load(self, manifest: Mapping[str, Any]) -> Snapshot:
        try:
            if type(manifest["round"]) is not int:
                raise TypeError(f"its round is {manifest['round']!r}")
            server = self._tree(manifest["server"], manifest["digests"])
            trees = {client: self._tree(name, manifest["digests"]) for client, name in manifest["clients"].items()}
            clients = {client: ClientState(tree["entries"], tree["memory"]) for client, tree in trees.items()}
            self.client_files, self.digests = dict(manifest["clients"]), dict(manifest["digests"])
            return Snapshot(manifest["round"], server["state"], server["memory"], clients, manifest["notes"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Damaged(f"A checkpoint in {self.folder} is incomplete ({type(error).__name__}: {error}).") from error

    def _tree(self, name: str, digests: Mapping[str, str]) -> Any:
        path = self.folder / name
        if Path(name).name != name:
            raise Damaged(f"{path} does not belong to this checkpoint.")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Damaged(f"Cannot read {path} ({error.strerror}).") from error
        if digest_of(data) != digests.get(name):
            raise Damaged(f"{path} is damaged (its digest does not match).")
        try:
            return unpacked(data)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{path} is damaged ({type(error).__name__}: {error}).") from error


def digest(snapshot: Snapshot) -> str:
    """Return one hash over the state of the server and all clients; clients that do not send their state report its hash."""
    reported: Mapping[str, str] | None = snapshot.notes.get("client_digests")
    if reported is None:
        reported = {client: client_digest(state) for client, state in snapshot.clients.items()}
    return joint_digest(snapshot, reported)


def joint_digest(snapshot: Snapshot, clients: Mapping[str, str]) -> str:
    """Return the hash of a run from the hashes of its client states, which may be on other machines."""
    tree = {"state": dict(sorted(snapshot.state.items())), "memory": snapshot.memory, "clients": dict(sorted(clients.items()))}
    return tree_digest(tree)
