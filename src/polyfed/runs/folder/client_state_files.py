"""Client state on the client's disk: one file per version, written atomically.

The server names the versions. Every request specifies the version to start from and the versions that may still be needed. A node uses
exactly the specified version, never a newer one from a round that was rolled back, and removes older versions that are not needed.
Versions are ordered by name: first the start time of the server, then a running number.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError

from polyfed.core.workbench import ClientState, client_digest
from polyfed.errors import ClientFailure, StateLost
from polyfed.runs.folder.atomic_write import UNFINISHED, write_atomically
from polyfed.trees import packed, unpacked

VERSION = re.compile(r"[0-9a-f]{16}-\d{8}-r\d+-a\d+")
RUN = re.compile(r"[0-9a-f]{32}")
SUFFIX = ".safetensors"
NODES = "nodes"
"""Folder of a simulated run that contains the client state."""


def version_name(started: int, number: int, round_number: int, attempt: int) -> str:
    """Return the name of a version from the start time of the server and a running number; round and attempt are for readers.

    >>> version_name(255, 7, 3, 0)
    '00000000000000ff-00000007-r3-a0'
    """
    return f"{started:016x}-{number:08d}-r{round_number}-a{attempt}"


def read_states(home: Path, marks: Mapping[str, ClientState]) -> dict[str, ClientState]:
    """Read client states from this machine, given the version and digest of each that the server has recorded."""
    return {
        client: ClientStateFiles(home, mark.memory["run"], client).load(mark.memory["version"], mark.memory["digest"])
        for client, mark in marks.items()
    }


class ClientStateFiles:
    """The state versions of one client in one run."""

    def __init__(self, home: Path, run: str, client: str) -> None:
        if not RUN.fullmatch(run):
            raise ClientFailure(f"Client {client}: {run!r} is not a valid run id.")
        self.client = client
        self.folder = home / run / hashlib.sha256(client.encode()).hexdigest()[:16]

    def load(self, version: str, digest: str) -> ClientState:
        """Read a version.

        Raises:
            StateLost: If it is missing, damaged, or different from what the server expects.
        """
        path = self._path(version)
        try:
            tree = unpacked(path.read_bytes())
            state = ClientState(tree["entries"], tree["memory"])
        except FileNotFoundError as error:
            raise StateLost(
                f"Client {self.client}: the server requests version {version}, which is not in {self.folder}. "
                f"Existing versions: {', '.join(self.versions()) or 'none'}."
            ) from error
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise StateLost(f"Client {self.client}: cannot read {path} ({type(error).__name__}: {error}).") from error
        if client_digest(state) != digest:
            raise StateLost(
                f"Client {self.client}: {path} differs from the version that the server expects (its digest does not match)."
            )
        return state

    def store(self, version: str, state: ClientState) -> str:
        """Write a version, and return its digest."""
        path = self._path(version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            data = packed({"entries": state.entries, "memory": state.memory})
            write_atomically(path, data, part_suffix=f"{UNFINISHED}-{os.getpid()}")
        except OSError as error:
            raise ClientFailure(
                f"Client {self.client}: cannot write its state to {self.folder}: {error.strerror or error}."
            ) from error
        return client_digest(state)

    def tidy(self, needed: Collection[str], before: str) -> None:
        """Remove versions older than ``before`` that are not needed; a late request does not remove newer versions."""
        for version in self.versions():
            if version < before and version not in needed:
                self._path(version).unlink(missing_ok=True)
        for torn in self.folder.glob(f"*{UNFINISHED}-*"):
            if torn.name.split(".", 1)[0] < before:
                torn.unlink(missing_ok=True)

    def versions(self) -> list[str]:
        """Return the existing versions, oldest first."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))

    def _path(self, version: str) -> Path:
        if not VERSION.fullmatch(version):
            raise ClientFailure(f"Client {self.client}: {version!r} is not a valid version.")
        return self.folder / f"{version}{SUFFIX}"
