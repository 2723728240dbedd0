"""The folder of a server: where each of its files is, and what is remembered of how it was started."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tomli_w

from polyfed.errors import SettingError
from polyfed.flower.deploy.private_files import private_folder, secret_in, used_alone, write_private

DESCRIPTION = "server.toml"


class ServerFolder:
    """Paths in the folder; nothing is made before it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.audit = path / "audit.jsonl"
        self.certificates = path / "certificates"  # the authority, and the certificate that nodes see
        self.front = path / "front"  # nginx's files
        self.kits = path / "kits"
        self.app = path / "app"  # the run's Flower app: settings, no code
        self.run = path / "run"
        self.logs = path / "logs"
        self.link = path / "superlink"
        self.link_certificates = self.link / "certificates"  # for loopback; no other machine knows their authority
        self.database = self.link / "state.db"
        self.flower_home = self.link / "home"
        self.runtime_secret = self.link / "runtime.secret"  # of the SuperLink's Runtime

    @property
    def front_secret(self) -> str:
        """By which the SuperLink and the enrolment service know the front."""
        return secret_in(self.link / "front.secret").decode()

    @property
    def control_secret(self) -> str:
        """By which the SuperLink knows ``polyfed serve``."""
        return secret_in(self.link / "control.secret").decode()

    def make(self) -> None:
        """Make the folders; only this account may enter them."""
        within = (self.certificates, self.link, self.link_certificates, self.flower_home, self.front, self.kits, self.logs)
        for folder in (self.path, *within):
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
