"""Checkpoints: safetensors files and a manifest that is renamed last. No pickle.

A checkpoint is a manifest ``manifest-<round>.json`` naming files with their digests. Files are written atomically and
never changed afterwards. Only clients that changed since the last checkpoint are written. The last two good checkpoints are kept, so
that a damaged one can be left behind.

What is to be written is first gathered in a ``Draft``. One that is ``apart`` from the run can be written by another thread while the
next round trains.
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
    """Everything a run needs to go on: nothing else is looked at."""

    round: int
    state: dict[str, Tensor]
    memory: dict[str, Any] = field(default_factory=dict)
    clients: Mapping[str, ClientState] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def copied(snapshot: Snapshot) -> Snapshot:
    """The snapshot as it would be read back from a checkpoint: later training cannot change it."""
    clients = {client: ClientState(own(state.entries), own(state.memory)) for client, state in snapshot.clients.items()}
    return Snapshot(snapshot.round, own(snapshot.state), own(snapshot.memory), clients, own(snapshot.notes))


class Watched(NamedTuple):
    """A tensor that was not copied, and its version, by which a change in place shows."""

    name: str
    value: Tensor
    version: int


def watch(entries: Mapping[str, Tensor], whose: str, watched: list[Watched]) -> dict[str, Tensor]:
    """The same entries, watched from now on; copied where a tensor cannot be watched, or not be written as it lies."""
    same = dict(entries)
    for name, value in entries.items():
        if value.is_contiguous() and not value.is_inference():
            watched.append(Watched(f"{name!r} {whose}", value, value._version))
        else:
            same[name] = own(value)
    return same


@dataclass(frozen=True)
class Draft:
    """What a checkpoint writes: the server and the clients that are due. The others of ``everyone`` keep the file they have."""

    round: int
    finished: bool
    state: Mapping[str, Tensor]
    memory: Mapping[str, Any]
    clients: Mapping[str, ClientState]
    everyone: Sequence[str]
    notes: Mapping[str, Any]
    watched: Sequence[Watched] = ()

    @property
    def stamp(self) -> str:
        """Part of the names of its files; the checkpoint of a finished run has names of its own."""
        return f"{self.round:06d}{'_final' if self.finished else ''}"

    def apart(self, state_is_replaced: bool) -> Draft:
        """A draft that the next round cannot change.

        Memory is copied, since methods change it in place. Entries that clients keep are never changed in place, and neither is
        the state where ``state_is_replaced``: such values are watched, not copied, and checked when they have been written.
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
        """The size of what ``apart`` copied."""
        of_clients = sum(size(state.entries) + size(state.memory) for state in self.clients.values())
        return size(self.state) + size(self.memory) + of_clients - sum(watched.value.nbytes for watched in self.watched)

    def require_untouched(self) -> None:
        """Refuse to vouch for values that were changed while they were written."""
        for name, value, version in self.watched:
            if value._version != version:
                raise RunFolderError(
                    f"{name} was changed in place while the checkpoint of round {self.round} was written. Put a new tensor in its "
                    "place (server.state = server.state | {name: value}). The last good checkpoint is untouched."
                )


class Checkpoints:
    """The checkpoint folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client_files: dict[str, str] = {}
        self.digests: dict[str, str] = {}

    def write(self, snapshot: Snapshot, changed: set[str], finished: bool = False) -> None:
        """Write a checkpoint at once; clients that did not change keep the file they have."""
        self.write_draft(self.draft(snapshot, changed, finished))

    def draft(self, snapshot: Snapshot, changed: set[str], finished: bool = False) -> Draft:
        """What a checkpoint of this snapshot has to write. It is the snapshot's own values, not copies."""
        lost = self._lost_files()
        kept = {client for client, name in self.client_files.items() if name not in lost}
        due = {client: snapshot.clients[client] for client in sorted(changed | (set(snapshot.clients) - kept))}
        return Draft(snapshot.round, finished, snapshot.state, snapshot.memory, due, list(snapshot.clients), snapshot.notes)

    def _lost_files(self) -> set[str]:
        """Files of the last checkpoints that somebody deleted since; they are named, and what is needed of them is written again."""
        there = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        lost = set(self.digests) - there
        for name in sorted(lost)[:MAX_NAMED]:
            log.warning("%s was deleted while the run was trained; what it held is written again.", self.folder / name)
        return lost

    def write_draft(self, draft: Draft) -> None:
        """Write what was drafted, the manifest last."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            server, manifest = f"server-{draft.stamp}.safetensors", f"manifest-{draft.stamp}.json"
            self._write_file(server, pieces({"state": draft.state, "memory": draft.memory}))
            for client, state in draft.clients.items():
                name = f"client-{hashlib.sha256(client.encode()).hexdigest()[:16]}-{draft.stamp}.safetensors"
                self._write_file(name, pieces({"entries": state.entries, "memory": state.memory}))
                self.client_files[client] = name
            draft.require_untouched()
            self.client_files = {client: self.client_files[client] for client in draft.everyone}
            content = {
                "format": FORMAT,
                "round": draft.round,
                "server": server,
                "clients": self.client_files,
                "digests": {name: self.digests[name] for name in sorted({server, *self.client_files.values()})},
                "notes": draft.notes,
            }
            sync_folder(self.folder)  # what the manifest names is durable before the manifest is
            self._write_file(manifest, [json.dumps(sealed(content), indent=1).encode()], sync=True)
            self._tidy(manifest)
        except OSError as error:
            raise RunFolderError(
                f"Cannot write a checkpoint to {self.folder}: {error.strerror or error}. The last good checkpoint is untouched."
            ) from error

    def _write_file(self, name: str, data: Sequence[Piece], sync: bool = False) -> None:
        self.digests[name] = write_atomically(self.folder / name, data, sync)

    def _tidy(self, newest: str) -> None:
        """Remove files that the last two checkpoints do not name. One later than the newest was damaged: the run went on before it."""
        used: set[str] = set()
        good = 0
        for path in self.manifests():
            if path.name > newest or good == KEPT_CHECKPOINTS:
                continue
            with contextlib.suppress(Damaged):
                used |= {path.name, *read_manifest(path)["digests"]}
                good += 1
        for path in self.folder.iterdir():
            if path.name not in used and path.suffix in (".safetensors", ".json", ".part"):
                path.unlink(missing_ok=True)
        self.digests = {name: digest for name, digest in self.digests.items() if name in used}

    def manifests(self) -> list[Path]:
        return manifest_files(self.folder)

    def read(self) -> tuple[Snapshot | None, list[str]]:
        """The newest good checkpoint, and a sentence for each damaged file that was passed over."""
        complaints: list[str] = []
        for path in self.manifests():
            try:
                manifest = read_manifest(path)
                return self._load(manifest), complaints
            except Damaged as damage:
                complaints.append(str(damage))
        return None, complaints

    def read_round(self, number: int) -> Snapshot | None:
        """The checkpoint of one round; None where later ones have taken its place. Raises ``Damaged`` where it is lost otherwise."""
        path = self.folder / f"manifest-{number:06d}.json"
        if not path.exists() and any(later.name > path.name for later in self.manifests()):
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
            raise Damaged(f"A checkpoint in {self.folder} lacks something ({type(error).__name__}: {error}).") from error

    def _tree(self, name: str, digests: Mapping[str, str]) -> Any:
        path = self.folder / name
        if Path(name).name != name:
            raise Damaged(f"{path} is not a file of this checkpoint.")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Damaged(f"{path} cannot be read ({error.strerror}).") from error
        if digest_of(data) != digests.get(name):
            raise Damaged(f"{path} is damaged (its digest does not match).")
        try:
            return unpacked(data)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"{path} is damaged ({type(error).__name__}: {error}).") from error


def digest(snapshot: Snapshot) -> str:
    """One hash over the state of the server and of all clients. Clients that keep their state to themselves have reported its hash."""
    reported: Mapping[str, str] | None = snapshot.notes.get("client_digests")
    if reported is None:
        reported = {client: client_digest(state) for client, state in snapshot.clients.items()}
    return joint_digest(snapshot, reported)


def joint_digest(snapshot: Snapshot, clients: Mapping[str, str]) -> str:
    """The hash of a run whose clients are known by their own hashes only, as where their state never leaves them."""
    tree = {"state": dict(sorted(snapshot.state.items())), "memory": snapshot.memory, "clients": dict(sorted(clients.items()))}
    return tree_digest(tree)
