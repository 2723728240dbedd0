"""Checkpoints: safetensors files and a manifest that is renamed last. No pickle.

A checkpoint is a manifest ``manifest-<round>.json`` naming files with their digests. Files are written beside and renamed; a file is
never changed afterwards. Only clients that changed since the last checkpoint are written. The last two checkpoints are kept, so that
a damaged one can be left behind.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from polyfed.client import Kept
from polyfed.errors import RunFolderError

FORMAT = 1
KEPT_CHECKPOINTS = 2


@dataclass
class Snapshot:
    """Everything a run needs to go on: nothing else is looked at."""

    round: int
    state: dict[str, Tensor]
    memory: dict[str, Any] = field(default_factory=dict)
    clients: Mapping[str, Kept] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def flattened(tree: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Part a tree of plain values and tensors into JSON with references, and named tensors."""
    if isinstance(tree, Tensor):
        return {"tensor": path}, {path: tree.detach().contiguous()}
    if isinstance(tree, Mapping):
        pairs = [(flattened(key)[0], *flattened(value, f"{path}/{index}")) for index, (key, value) in enumerate(tree.items())]
        return {"map": [[key, value] for key, value, _ in pairs]}, {n: t for _, _, tensors in pairs for n, t in tensors.items()}
    if isinstance(tree, list | tuple):
        items = [flattened(value, f"{path}/{index}") for index, value in enumerate(tree)]
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [item for item, _ in items]}, {n: t for _, tensors in items for n, t in tensors.items()}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}, {}
    raise TypeError(f"Memory may hold tensors, numbers, text, and lists and dicts of them; found {type(tree).__name__}.")


def rebuilt(json_tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that ``flattened`` parted."""
    ((kind, inner),) = json_tree.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "map":
        return {rebuilt(key, tensors): rebuilt(value, tensors) for key, value in inner}
    if kind == "list":
        return [rebuilt(item, tensors) for item in inner]
    if kind == "tuple":
        return tuple(rebuilt(item, tensors) for item in inner)
    return inner


def packed(tree: Any) -> bytes:
    """A tree as the bytes of one safetensors file."""
    json_tree, tensors = flattened(tree)
    seen: set[int] = set()
    return save_safetensors({name: _alone(value, seen) for name, value in tensors.items()}, {"tree": json.dumps(json_tree)})


def _alone(value: Tensor, seen: set[int]) -> Tensor:
    """A tensor that shares its storage with no other, copied only where it does."""
    storage = value.untyped_storage()
    whole = storage.nbytes() == value.numel() * value.element_size() and storage.data_ptr() not in seen
    seen.add(storage.data_ptr())
    return value if whole and value.numel() else value.clone()


def unpacked(data: bytes) -> Any:
    """The tree in the bytes of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return rebuilt(json.loads(header["__metadata__"]["tree"]), load_safetensors(data))


def copied(snapshot: Snapshot) -> Snapshot:
    """The snapshot as it would be read back from a checkpoint: later training cannot change it."""
    clients = {client: {"entries": kept.entries, "memory": kept.memory} for client, kept in snapshot.clients.items()}
    tree = unpacked(packed({"state": snapshot.state, "memory": snapshot.memory, "clients": clients, "notes": snapshot.notes}))
    kept = {client: Kept(held["entries"], held["memory"]) for client, held in tree["clients"].items()}
    return Snapshot(snapshot.round, tree["state"], tree["memory"], kept, tree["notes"])


class Checkpoints:
    """The checkpoint folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client_files: dict[str, str] = {}
        self.digests: dict[str, str] = {}

    def write(self, snapshot: Snapshot, changed: set[str], finished: bool = False) -> None:
        """Write a checkpoint; clients that did not change keep the file they have. The one of a finished run has names of its own."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            stamp = f"{snapshot.round:06d}{'_final' if finished else ''}"
            server = f"server-{stamp}.safetensors"
            self._put(server, packed({"state": snapshot.state, "memory": snapshot.memory}))
            for client in sorted(changed | (set(snapshot.clients) - set(self.client_files))):
                name = f"client-{hashlib.sha256(client.encode()).hexdigest()[:16]}-{stamp}.safetensors"
                kept = snapshot.clients[client]
                self._put(name, packed({"entries": kept.entries, "memory": kept.memory}))
                self.client_files[client] = name
            used = {server, *self.client_files.values()}
            manifest = {
                "format": FORMAT,
                "round": snapshot.round,
                "server": server,
                "clients": self.client_files,
                "digests": {name: self.digests[name] for name in sorted(used)},
                "notes": snapshot.notes,
            }
            self._put(f"manifest-{stamp}.json", json.dumps(sealed(manifest), indent=1).encode())
            self._tidy()
        except OSError as error:
            raise RunFolderError(
                f"Cannot write a checkpoint to {self.folder}: {error.strerror or error}. The last good checkpoint is untouched."
            ) from error

    def _put(self, name: str, data: bytes) -> None:
        """Write beside, make durable, rename."""
        beside = self.folder / f"{name}.part"
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / name)
        self.digests[name] = hashlib.sha256(data).hexdigest()

    def _tidy(self) -> None:
        """Remove files that the last two checkpoints do not name."""
        manifests = self.manifests()
        kept = set(manifests[:KEPT_CHECKPOINTS])
        used: set[str] = {path.name for path in kept}
        for path in kept:
            used |= set(json.loads(path.read_bytes())["digests"])
        for path in self.folder.iterdir():
            if path.name not in used and path.suffix in (".safetensors", ".json", ".part"):
                path.unlink(missing_ok=True)
        self.digests = {name: digest for name, digest in self.digests.items() if name in used}

    def manifests(self) -> list[Path]:
        """Manifests, newest first."""
        return sorted(self.folder.glob("manifest-*.json"), reverse=True)

    def read(self) -> tuple[Snapshot | None, list[str]]:
        """The newest good checkpoint, and a sentence for each damaged file that was passed over."""
        complaints: list[str] = []
        for path in self.manifests():
            try:
                manifest = opened(path)
                return self._load(manifest), complaints
            except Damaged as damage:
                complaints.append(str(damage))
        return None, complaints

    def read_round(self, number: int) -> Snapshot | None:
        """The checkpoint of one round, if it is there and good."""
        path = self.folder / f"manifest-{number:06d}.json"
        try:
            return self._load(opened(path))
        except Damaged:
            return None

    def _load(self, manifest: Mapping[str, Any]) -> Snapshot:
        server = self._tree(manifest["server"], manifest["digests"])
        clients = {}
        for client, name in manifest["clients"].items():
            tree = self._tree(name, manifest["digests"])
            clients[client] = Kept(tree["entries"], tree["memory"])
        self.client_files = dict(manifest["clients"])
        self.digests = dict(manifest["digests"])
        return Snapshot(manifest["round"], server["state"], server["memory"], clients, manifest["notes"])

    def _tree(self, name: str, digests: Mapping[str, str]) -> Any:
        path = self.folder / name
        if Path(name).name != name:
            raise Damaged(f"{path} is not a file of this checkpoint.")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Damaged(f"{path} cannot be read ({error.strerror}).") from error
        if hashlib.sha256(data).hexdigest() != digests.get(name):
            raise Damaged(f"{path} is damaged (its digest does not match).")
        try:
            return unpacked(data)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{path} is damaged ({error}).") from error


class Damaged(Exception):
    """A checkpoint file that cannot be trusted; the one before it is tried."""


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with a digest of itself."""
    return {**manifest, "seal": _seal(manifest)}


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def opened(path: Path) -> dict[str, Any]:
    """A manifest whose seal is whole."""
    try:
        manifest = json.loads(path.read_bytes())
        seal = manifest.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({type(error).__name__}).") from error
    if manifest.get("format", 0) > FORMAT:
        raise RunFolderError(
            f"{path} was written by a newer polyfed (checkpoint format {manifest['format']}, this one reads {FORMAT}). Upgrade polyfed to go on."
        )
    if seal != _seal(manifest):
        raise Damaged(f"{path} is damaged (its seal does not match).")
    return manifest  # type: ignore[no-any-return]


def digest(snapshot: Snapshot) -> str:
    """One hash over the state of the server and of all clients. Clients that keep their state to themselves have told its hash."""
    told: Mapping[str, str] | None = snapshot.notes.get("client_digests")
    held = {client: client_digest(kept) for client, kept in snapshot.clients.items()} if told is None else told
    return joint_digest(snapshot, held)


def joint_digest(snapshot: Snapshot, clients: Mapping[str, str]) -> str:
    """The hash of a run whose clients are known by their own hashes only, as where their state never leaves them."""
    tree = {"state": dict(sorted(snapshot.state.items())), "memory": snapshot.memory, "clients": dict(sorted(clients.items()))}
    return tree_digest(tree)


def client_digest(kept: Kept) -> str:
    """A hash of what a client keeps."""
    return tree_digest({"entries": dict(sorted(kept.entries.items())), "memory": kept.memory})


def tree_digest(tree: Any) -> str:
    """A hash of plain values and tensors."""
    json_tree, tensors = flattened(tree)
    total = hashlib.sha256(json.dumps(json_tree, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        total.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
