"""The folder of a server: where each of its files is, and what is remembered of how it was started."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.deploy.private_files import private_folder, secret_in, used_alone, write_private
from polyfed.errors import SettingError

DESCRIPTION = "server.toml"


@dataclass(frozen=True)
class ServerFolder:
    """Paths in the folder; nothing is made before it is needed."""

    path: Path

    @property
    def audit(self) -> Path:
        """The server's audit log."""
        return self.path / "audit.jsonl"

    @property
    def certificates(self) -> Path:
        """The authority, and the certificate that nodes see."""
        return self.path / "certificates"

    @property
    def link_certificates(self) -> Path:
        """The SuperLink's own certificate, for loopback; its authority is known to nobody else."""
        return self.path / "superlink" / "certificates"

    @property
    def database(self) -> Path:
        """The SuperLink's database."""
        return self.path / "superlink" / "state.db"

    @property
    def flower_home(self) -> Path:
        """Flower's own folder."""
        return self.path / "superlink" / "home"

    @property
    def front(self) -> Path:
        """Nginx's files."""
        return self.path / "front"

    @property
    def kits(self) -> Path:
        """A kit for each node."""
        return self.path / "kits"

    @property
    def app(self) -> Path:
        """The Flower app of the run: settings, no code."""
        return self.path / "app"

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.path / "run"

    @property
    def logs(self) -> Path:
        """What the processes say."""
        return self.path / "logs"

    @property
    def runtime_secret(self) -> Path:
        """The file with the secret of the SuperLink's Runtime."""
        return self.path / "superlink" / "runtime.secret"

    @property
    def front_secret(self) -> str:
        """By which the SuperLink and the enrolment service know the front."""
        return secret_in(self.path / "superlink" / "front.secret").decode()

    @property
    def control_secret(self) -> str:
        """By which the SuperLink knows ``polyfed serve``."""
        return secret_in(self.path / "superlink" / "control.secret").decode()

    def make(self) -> None:
        """Make the folders; only this account may enter them."""
        for folder in (self.path, self.certificates, self.path / "superlink", self.link_certificates, self.flower_home):
            private_folder(folder)
        for folder in (self.front, self.kits, self.logs):
            private_folder(folder)
        secret_in(self.runtime_secret)

    @property
    def is_made(self) -> bool:
        """Whether a server was started here before."""
        return (self.path / DESCRIPTION).exists()

    def describe(self, values: Mapping[str, Any]) -> None:
        """Remember how the server was started."""
        write_private(self.path / DESCRIPTION, tomli_w.dumps(dict(values)))

    def description(self) -> dict[str, Any]:
        """How the server was started."""
        try:
            return tomllib.loads((self.path / DESCRIPTION).read_text())
        except FileNotFoundError as error:
            raise SettingError(f"{self.path} is no folder of a server. polyfed serve makes one.") from error
        except ValueError as error:
            raise SettingError(f"{self.path / DESCRIPTION} cannot be read ({error}).") from error

    def locked(self) -> AbstractContextManager[None]:
        """One server at a time."""
        return used_alone(self.path, "server")
