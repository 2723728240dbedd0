"""Paths and saved state in the folders of servers and nodes."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import tomli_w

from polyfed.errors import SettingError
from polyfed.flower.deploy.private_files import private_folder, write_private
from polyfed.flower.deploy.processes import Child, start
from polyfed.runs.folder.audit_log import AuditLog

POLICY = "node.toml"


class DeploymentFolder:
    """Paths in a folder that only this account may enter."""

    who: ClassVar[str]
    variable: ClassVar[str]  # environment variable that contains the folder's path in child processes
    folders: Sequence[Path]
    flower_home: Path
    runtime_secret: Path  # secret of the Runtime of the SuperLink or SuperNode

    def __init__(self, path: Path) -> None:
        self.path = path
        self.audit = path / "audit.jsonl"
        self.logs = path / "logs"

    @classmethod
    def of_this_process(cls) -> Self:
        return cls(Path(os.environ[cls.variable]))

    def make(self) -> None:
        for folder in (self.path, *self.folders):
            private_folder(folder)
        _secret_in(self.runtime_secret)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with (self.path / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"A {self.who} already runs in {self.path}. Stop it first, or choose another --folder."
                raise SettingError(message) from error
            yield

    def note(self, event: str, **facts: Any) -> None:
        AuditLog(self.audit).write(event, **facts)

    def start(self, name: str, command: Sequence[str], dies_by: int = signal.SIGKILL) -> Child:
        return start(name, command, self.logs, {"FLWR_HOME": str(self.flower_home), self.variable: str(self.path)}, dies_by)


class ServerFolder(DeploymentFolder):
    who, variable = "server", "POLYFED_SERVER_FOLDER"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.described = path / "server.toml"
        self.certificates = path / "certificates"  # authority and server certificate
        self.front = path / "front"  # files of nginx, the reverse proxy
        self.kits = path / "kits"
        self.app = path / "app"  # Flower app of the run: settings, no code
        self.run = path / "run"
        self.link = path / "superlink"
        self.link_certificates = self.link / "certificates"  # for loopback only
        self.node_numbers = self.link / "numbers.json"  # node names by SuperLink number
        self.database = self.link / "state.db"
        self.flower_home = self.link / "home"
        self.runtime_secret = self.link / "runtime.secret"
        link = (self.link, self.link_certificates, self.flower_home)
        self.folders = (self.certificates, *link, self.front, self.kits, self.logs)

    @property
    def front_secret(self) -> str:
        """Secret with which nginx authenticates to the SuperLink and the enrolment service."""
        return _secret_in(self.link / "front.secret").decode()

    @property
    def control_secret(self) -> str:
        """Secret with which ``polyfed serve`` authenticates to the SuperLink."""
        return _secret_in(self.link / "control.secret").decode()

    def describe(self, values: Mapping[str, Any]) -> None:
        write_private(self.described, tomli_w.dumps(dict(values)))

    def description(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.described.read_text())
        except FileNotFoundError as error:
            raise SettingError(f"{self.path} is not a server folder. Create one with polyfed serve.") from error
        except ValueError as error:
            raise SettingError(f"Cannot read {self.described} ({error}).") from error


@dataclass(frozen=True)
class Membership:
    """The server of a node, and the node's name there; ``token`` is the hash of its enrolment token."""

    name: str
    host: str
    port: int
    token: str


class NodeFolder(DeploymentFolder):
    who, variable = "node", "POLYFED_NODE_FOLDER"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.policy = path / POLICY
        self.server = path / "server.json"
        self.privacy_account = path / "privacy.jsonl"
        self.state = path / "state"  # local client state
        self.flower_home = path / "flower"
        self.config = self.flower_home / "node-config.toml"  # node configuration for ClientApps
        self.keys = path / "keys"
        self.authority = self.keys / "server-ca.crt"
        self.tls_key = self.keys / "node.key"
        self.certificate_request = self.keys / "node.csr"
        self.certificate = self.keys / "node.crt"
        self.flower_key = self.keys / "flower.key"
        self.runtime_secret = self.keys / "runtime.secret"
        self.local_certificates = self.keys / "loopback"  # for the forwarder
        self.folders = (self.keys, self.local_certificates, self.flower_home, self.state, self.logs)

    def membership(self) -> Membership | None:
        return Membership(**json.loads(self.server.read_text())) if self.server.exists() else None

    def remember(self, membership: Membership) -> None:
        write_private(self.server, json.dumps(asdict(membership)))


def _secret_in(path: Path) -> bytes:
    """Read the secret of a file; the first use creates a random one."""
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return path.read_bytes()
