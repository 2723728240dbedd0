"""What a client keeps between messages, on its own disk: one file for each version, written atomically.

The server names versions, and says in every ask which one the client starts from and which ones may still be needed. A node uses
exactly the version that the ask names, never a newer one from a round the server has forgotten, and removes those older than
the ask that nobody needs. Versions are ordered by name: first the server's own start, then a running number.
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
"""The folder of a simulated run in which its clients keep their state."""


def version_name(begun: int, number: int, round_number: int, attempt: int) -> str:
    """The name of a version: when the server began, a running number, and what it belongs to, for people to read.

    >>> version_name(255, 7, 3, 0)
    '00000000000000ff-00000007-r3-a0'
    """
    return f"{begun:016x}-{number:08d}-r{round_number}-a{attempt}"


def read_states(home: Path, marks: Mapping[str, ClientState]) -> dict[str, ClientState]:
    """What clients keep, read from this machine by the marks that the server has of it."""
    return {
        client: ClientStateFiles(home, mark.memory["run"], client).load(mark.memory["version"], mark.memory["digest"])
        for client, mark in marks.items()
    }


class ClientStateFiles:
    """The versions of one client in one run."""

    def __init__(self, home: Path, run: str, client: str) -> None:
        if not RUN.fullmatch(run):
            raise ClientFailure(f"Client {client}: {run!r} is not the id of a run.")
        self.client = client
        self.folder = home / run / hashlib.sha256(client.encode()).hexdigest()[:16]

    def load(self, version: str, digest: str) -> ClientState:
        """What the client kept in a version; a version that is missing or not what the server knows is refused."""
        path = self._path(version)
        try:
            tree = unpacked(path.read_bytes())
            state = ClientState(tree["entries"], tree["memory"])
        except FileNotFoundError as error:
            raise StateLost(
                f"Client {self.client}: the server resumes from version {version}, which is not in {self.folder}. "
                f"Versions there: {', '.join(self.versions()) or 'none'}."
            ) from error
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise StateLost(f"Client {self.client}: {path} cannot be read ({type(error).__name__}: {error}).") from error
        if client_digest(state) != digest:
            raise StateLost(f"Client {self.client}: {path} is not what the server knows as this version (its digest differs).")
        return state

    def store(self, version: str, state: ClientState) -> str:
        """Write a version; returns its digest."""
        path = self._path(version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            data = packed({"entries": state.entries, "memory": state.memory})
            write_atomically(path, data, part_suffix=f"{UNFINISHED}-{os.getpid()}")
        except OSError as error:
            raise ClientFailure(
                f"Client {self.client}: cannot write what it keeps to {self.folder}: {error.strerror or error}."
            ) from error
        return client_digest(state)

    def tidy(self, needed: Collection[str], before: str) -> None:
        """Remove versions older than ``before`` that nobody needs; an ask that comes late removes nothing that is newer than itself."""
        for version in self.versions():
            if version < before and version not in needed:
                self._path(version).unlink(missing_ok=True)
        for torn in self.folder.glob(f"*{UNFINISHED}-*"):
            if torn.name.split(".", 1)[0] < before:
                torn.unlink(missing_ok=True)

    def versions(self) -> list[str]:
        """The versions that are here, oldest first."""
        return sorted(path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))

    def _path(self, version: str) -> Path:
        if not VERSION.fullmatch(version):
            raise ClientFailure(f"Client {self.client}: {version!r} is not a version.")
        return self.folder / f"{version}{SUFFIX}"
