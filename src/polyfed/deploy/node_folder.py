"""The folder of a node: where each of its files is, and which server it belongs to."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from polyfed.deploy.policy import FILE
from polyfed.deploy.private_files import private_folder, secret_in, used_alone, write_private

FOLDER_VARIABLE = "POLYFED_NODE_FOLDER"


@dataclass(frozen=True)
class Membership:
    """Which server the node belongs to, under which name; ``token`` is the hash of the token it enrolled with."""

    name: str
    host: str
    port: int
    token: str


@dataclass(frozen=True)
class NodeFolder:
    """Paths in the folder."""

    path: Path

    @property
    def policy(self) -> Path:
        """What the node allows."""
        return self.path / FILE

    @property
    def audit(self) -> Path:
        """The node's audit log."""
        return self.path / "audit.jsonl"

    @property
    def privacy_account(self) -> Path:
        """What the node has spent of its privacy, over all runs."""
        return self.path / "privacy.jsonl"

    @property
    def authority(self) -> Path:
        """The certificate of the server's authority."""
        return self.path / "keys" / "server-ca.crt"

    @property
    def tls_key(self) -> Path:
        """The node's private key for TLS."""
        return self.path / "keys" / "node.key"

    @property
    def certificate(self) -> Path:
        """The node's certificate."""
        return self.path / "keys" / "node.crt"

    @property
    def flower_key(self) -> Path:
        """The node's private key for Flower."""
        return self.path / "keys" / "flower.key"

    @property
    def local_certificates(self) -> Path:
        """The certificate of the forwarder on loopback."""
        return self.path / "keys" / "loopback"

    @property
    def runtime_secret(self) -> Path:
        """The secret of the SuperNode's Runtime."""
        return self.path / "keys" / "runtime.secret"

    @property
    def config(self) -> Path:
        """What the SuperNode gives to ClientApps."""
        return self.path / "flower" / "node-config.toml"

    @property
    def flower_home(self) -> Path:
        """Flower's own folder."""
        return self.path / "flower"

    @property
    def state(self) -> Path:
        """What stays local between rounds."""
        return self.path / "state"

    @property
    def logs(self) -> Path:
        """What the processes say."""
        return self.path / "logs"

    def make(self) -> None:
        """Make the folders; only this account may enter them."""
        for folder in (self.path, self.path / "keys", self.local_certificates, self.flower_home, self.state, self.logs):
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
