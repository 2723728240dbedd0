"""The folder of a node: where each of its files is, and which server it belongs to."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from polyfed.flower.deploy.private_files import private_folder, secret_in, used_alone, write_private
from polyfed.flower.join.policy import FILE

FOLDER_VARIABLE = "POLYFED_NODE_FOLDER"


@dataclass(frozen=True)
class Membership:
    """Which server the node belongs to, under which name; ``token`` is the hash of the token it enrolled with."""

    name: str
    host: str
    port: int
    token: str


class NodeFolder:
    """Paths in the folder; nothing is made before it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.policy = path / FILE
        self.audit = path / "audit.jsonl"
        self.privacy_account = path / "privacy.jsonl"
        self.state = path / "state"  # what stays local between rounds
        self.logs = path / "logs"
        self.flower_home = path / "flower"
        self.config = self.flower_home / "node-config.toml"  # what the SuperNode gives to ClientApps
        self.keys = path / "keys"
        self.authority = self.keys / "server-ca.crt"
        self.tls_key = self.keys / "node.key"
        self.certificate = self.keys / "node.crt"
        self.flower_key = self.keys / "flower.key"
        self.runtime_secret = self.keys / "runtime.secret"  # of the SuperNode's Runtime
        self.local_certificates = self.keys / "loopback"  # of the forwarder

    def make(self) -> None:
        """Make the folders; only this account may enter them."""
        for folder in (self.path, self.keys, self.local_certificates, self.flower_home, self.state, self.logs):
            private_folder(folder)
        secret_in(self.runtime_secret)

    def membership(self) -> Membership | None:
        """Which server the node belongs to; None: none yet."""
        file = self.path / "server.json"
        return Membership(**json.loads(file.read_text())) if file.exists() else None

    def remember(self, membership: Membership) -> None:
        """Write down which server the node belongs to."""
        write_private(self.path / "server.json", json.dumps(asdict(membership)))

    def locked(self) -> AbstractContextManager[None]:
        """One node at a time."""
        return used_alone(self.path, "node")
