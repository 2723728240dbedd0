"""The reverse proxy (nginx), the only part of the server that is reachable from outside, and its generated configuration."""

from __future__ import annotations

import base64
import grp
import json
import os
import pwd
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.errors import MissingExtra, SettingError
from polyfed.flower.deploy.private_files import private_folder, write_private
from polyfed.flower.deploy.templates import render
from polyfed.flower.serve.registry import NodeRecord
from polyfed.runs.folder.audit_log import AuditLog

ENROL_PATH = "/polyfed/enrol"
FLEET = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
"""Requests of a SuperNode with a registered key. Registering is not among them, because ``polyfed serve`` registers nodes."""
SECRET_HEADER, ADDRESS_HEADER, SERIAL_HEADER = "X-Polyfed-Front", "X-Polyfed-Address", "X-Polyfed-Serial"
LARGEST_OBJECT, LARGEST_ENROLMENT = "64m", "16k"
WORKERS = "nobody"
NEWLINE = "\n"
UNUSABLE = set("\"'$;{}\\@") | {NEWLINE}
PLACES = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin"


@dataclass(frozen=True)
class Front:
    """Configuration of the reverse proxy."""

    folder: Path  # nginx's files
    listen: str  # address to listen on, such as 0.0.0.0
    port: int
    link: int  # port of the SuperLink on loopback
    enrolment: int  # port of the enrolment service on loopback
    secret: str  # authenticates nginx to these two
    certificates: Path  # folder with the server's certificate and key and the authority's certificate
    link_authority: Path  # authority of the SuperLink's certificate

    @property
    def file(self) -> Path:
        return self.folder / "nginx.conf"

    def write(self, nodes: Iterable[NodeRecord]) -> bool:
        """Write nginx's configuration for these nodes. Return True if it changed."""
        private_folder(self.folder)
        text = self.text(nodes)
        if self.file.exists() and self.file.read_text() == text:
            return False
        write_private(self.file, text)
        return True

    def command(self) -> list[str]:
        """Return the command that runs nginx in the foreground."""
        return [nginx(), "-c", str(self.file), "-p", str(self.folder), "-e", str(self.folder / "error.log")]

    def check(self) -> None:
        """Have nginx check its configuration."""
        done = subprocess.run([*self.command(), "-t", "-q"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SettingError(f"nginx rejects its generated configuration: {' '.join(done.stderr.split())}")

    def text(self, nodes: Iterable[NodeRecord]) -> str:
        return render(
            "nginx.conf",
            user=_worker_user(),
            folder=self.folder,
            certificates=self.certificates,
            link_authority=self.link_authority,
            listen=f"[{self.listen}]:{self.port}" if ":" in self.listen else f"{self.listen}:{self.port}",
            link=self.link,
            enrolment=self.enrolment,
            secret_header=SECRET_HEADER,
            secret=self.secret,
            address_header=ADDRESS_HEADER,
            serial_header=SERIAL_HEADER,
            enrol_path=ENROL_PATH,
            fleet="|".join(FLEET),
            largest_object=LARGEST_OBJECT,
            largest_enrolment=LARGEST_ENROLMENT,
            allowed=[
                (serial, base64.b64encode(node.key.encode()).decode(), node.name) for node in nodes for serial in node.serials
            ],
        )

    def __post_init__(self) -> None:
        for path in (self.folder, self.certificates, self.link_authority):
            if set(str(path)) & UNUSABLE:
                characters = " ".join(sorted(UNUSABLE - {NEWLINE}))
                raise SettingError(f"nginx cannot use the folder {path}, because its path contains one of {characters}.")


def _worker_user() -> str:
    """Return the line that sets the account of nginx's workers: never root, since they are reachable from the network."""
    if os.getuid() != 0:
        return "# The workers run under the account that starts nginx."
    return f"user {WORKERS} {grp.getgrgid(pwd.getpwnam(WORKERS).pw_gid).gr_name}"


def nginx() -> str:
    found = shutil.which("nginx", path=PLACES)
    if found is None:
        raise MissingExtra("polyfed serve requires nginx. Install it (Debian, Ubuntu: apt install nginx-light).")
    return found


GOOD = (200, 499)  # OK, or the node disconnected before the response
MAX_LINES = 100  # maximum audit lines per poll; further requests are only counted, so that they cannot fill the disk
ROTATE_AT = 16 * 1024 * 1024
WHO = ("address", "request", "path", "status", "certificate", "serial", "subject", "node")


class FrontLog:
    """Reads new lines of nginx's log. Its position is on disk, so that a restarted server misses none."""

    def __init__(self, access_log: Path, audit: AuditLog) -> None:
        self.path, self.audit = access_log, audit
        self.offset_file = access_log.with_name("access.offset")
        self.offset = int(self.offset_file.read_text()) if self.offset_file.exists() else 0

    def poll(self) -> dict[str, dict[str, Any]]:
        """Audit the requests rejected since the last poll. Return each node's last successful request."""
        refused: Counter[tuple[Any, ...]] = Counter()
        seen: dict[str, dict[str, Any]] = {}
        for line in self.new_lines():
            if line.get("node") and line.get("status") in GOOD:
                seen[str(line["node"])] = line
            elif line.get("status") != 200:
                refused[tuple(line.get(name) for name in WHO)] += 1
        for who, count in refused.most_common(MAX_LINES):
            self.audit.write("refused at the front", **dict(zip(WHO, who, strict=True)), count=count)
        if rest := sum(refused.values()) - sum(count for _, count in refused.most_common(MAX_LINES)):
            self.audit.write("refused at the front", count=rest, why="too many different requests to list")
        return seen

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines since the last poll."""
        if not self.path.exists():
            return
        if self.path.stat().st_size < self.offset:
            self.offset = 0
        before = self.offset
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self.offset += len(text)
                try:
                    line = json.loads(text)
                except ValueError:
                    line = {"path": text.decode(errors="replace"), "status": 0}
                yield line
        if self.offset != before:
            if self.offset > ROTATE_AT and self.offset == self.path.stat().st_size:
                # nginx opened the file for appending, so it continues at the start of the emptied file.
                self.path.write_bytes(b"")
                self.offset = 0
            write_private(self.offset_file, str(self.offset))
