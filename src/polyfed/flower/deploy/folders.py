"""The folders of servers and nodes: where each of their files is, and what is remembered in them."""

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
    """Paths in a folder that only this account may enter; nothing is made before it is needed."""

    who: ClassVar[str]
    variable: ClassVar[str]
    """Names the folder in the environment of the processes that work for it."""
    folders: Sequence[Path]
    flower_home: Path
    runtime_secret: Path
    """Of the SuperLink's or the SuperNode's Runtime."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.audit = path / "audit.jsonl"
        self.logs = path / "logs"

    @classmethod
    def of_this_process(cls) -> Self:
        """The folder that this process works for."""
        return cls(Path(os.environ[cls.variable]))

    def make(self) -> None:
        for folder in (self.path, *self.folders):
            private_folder(folder)
        _secret_in(self.runtime_secret)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else uses the folder inside the block; a second process is refused."""
        with (self.path / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = f"A {self.who} already runs in {self.path}. Stop it first, or name another --folder."
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
        self.certificates = path / "certificates"  # the authority, and the certificate that nodes see
        self.front = path / "front"  # nginx's files
        self.kits = path / "kits"
        self.app = path / "app"  # the run's Flower app: settings, no code
        self.run = path / "run"
        self.link = path / "superlink"
        self.link_certificates = self.link / "certificates"  # for loopback; no other machine knows their authority
        self.node_numbers = self.link / "numbers.json"  # names of nodes by the numbers that the SuperLink gave them
        self.database = self.link / "state.db"
        self.flower_home = self.link / "home"
        self.runtime_secret = self.link / "runtime.secret"
        link = (self.link, self.link_certificates, self.flower_home)
        self.folders = (self.certificates, *link, self.front, self.kits, self.logs)

    @property
    def front_secret(self) -> str:
        """By which the SuperLink and the enrolment service know the front."""
        return _secret_in(self.link / "front.secret").decode()

    @property
    def control_secret(self) -> str:
        """By which the SuperLink knows ``polyfed serve``."""
        return _secret_in(self.link / "control.secret").decode()

    def describe(self, values: Mapping[str, Any]) -> None:
        write_private(self.described, tomli_w.dumps(dict(values)))

    def description(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.described.read_text())
        except FileNotFoundError as error:
            raise SettingError(f"{self.path} is no folder of a server. polyfed serve makes one.") from error
        except ValueError as error:
            raise SettingError(f"{self.described} cannot be read ({error}).") from error


@dataclass(frozen=True)
class Membership:
    """Which server the node belongs to, under which name; ``token`` is the hash of the token it enrolled with."""

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
        self.state = path / "state"  # what stays local between rounds
        self.flower_home = path / "flower"
        self.config = self.flower_home / "node-config.toml"  # what the SuperNode gives to ClientApps
        self.keys = path / "keys"
        self.authority = self.keys / "server-ca.crt"
        self.tls_key = self.keys / "node.key"
        self.certificate_request = self.keys / "node.csr"
        self.certificate = self.keys / "node.crt"
        self.flower_key = self.keys / "flower.key"
        self.runtime_secret = self.keys / "runtime.secret"
        self.local_certificates = self.keys / "loopback"  # of the forwarder
        self.folders = (self.keys, self.local_certificates, self.flower_home, self.state, self.logs)

    def membership(self) -> Membership | None:
        """Which server the node belongs to; None: none yet."""
        return Membership(**json.loads(self.server.read_text())) if self.server.exists() else None

    def remember(self, membership: Membership) -> None:
        write_private(self.server, json.dumps(asdict(membership)))


def _secret_in(path: Path) -> bytes:
    """The random secret of a file; made with the first use."""
    if not path.exists():
        write_private(path, secrets.token_hex(32))
    return path.read_bytes()
