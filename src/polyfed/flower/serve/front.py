"""The front: nginx, which is all that nodes and strangers reach. Its file is generated here.

It passes the ten requests that a SuperNode makes, for a certificate that is enrolled and with the Flower key that belongs to it; and one
path of our own, on which nodes enrol. All else is closed without an answer. The SuperLink behind it listens on loopback only.
"""

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
"""What a SuperNode with a registered key asks for. It need not register or unregister itself, so it may not."""
SECRET_HEADER, ADDRESS_HEADER, SERIAL_HEADER = "X-Polyfed-Front", "X-Polyfed-Address", "X-Polyfed-Serial"
LARGEST_OBJECT, LARGEST_ENROLMENT = "64m", "16k"
NEWLINE = "\n"
UNUSABLE = set("\"'$;{}\\@") | {NEWLINE}
PLACES = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/usr/local/sbin"


@dataclass(frozen=True)
class Front:
    """Where the front listens, what it stands in front of, and its files."""

    folder: Path  # of its own files
    listen: str  # address to listen on, such as 0.0.0.0
    port: int
    link: int  # port of the SuperLink on loopback
    enrolment: int  # port of the enrolment service on loopback
    secret: str  # by which those two know the front
    certificates: Path  # folder with the server's certificate, its key and the authority's certificate
    link_authority: Path  # signed the SuperLink's own certificate

    @property
    def file(self) -> Path:
        return self.folder / "nginx.conf"

    def write(self, nodes: Iterable[NodeRecord]) -> bool:
        """Write nginx's file for the nodes that may come in; says whether it changed."""
        private_folder(self.folder)
        text = self.text(nodes)
        if self.file.exists() and self.file.read_text() == text:
            return False
        write_private(self.file, text)
        return True

    def command(self) -> list[str]:
        """How nginx is started, in the foreground."""
        return [nginx(), "-c", str(self.file), "-p", str(self.folder), "-e", str(self.folder / "error.log")]

    def check(self) -> None:
        """Let nginx read the file before it is used."""
        done = subprocess.run([*self.command(), "-t", "-q"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SettingError(f"nginx refuses the file that was generated for it: {' '.join(done.stderr.split())}")

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
                raise SettingError(
                    f"nginx cannot use the folder {path}: its path has one of {' '.join(sorted(UNUSABLE - {NEWLINE}))}."
                )


def _worker_user() -> str:
    """The account of nginx's workers, which talk to the network: never root. Other accounts cannot change it."""
    if os.getuid() != 0:
        return "# its workers have the account of who started it"
    nobody = pwd.getpwnam("nobody")
    return f"user nobody {grp.getgrgid(nobody.pw_gid).gr_name}"


def nginx() -> str:
    found = shutil.which("nginx", path=PLACES)
    if found is None:
        raise MissingExtra(
            "polyfed serve needs nginx in front of the SuperLink. Install it (Debian, Ubuntu: apt install nginx-light)."
        )
    return found


GOOD = (200, 499)
"""Answered; or the node went away before the answer."""
MAX_LINES = 100
"""Audited at one look; more are counted together, so that nobody fills the disk line by line."""
ROTATE_AT = 16 * 1024 * 1024
WHO = ("address", "request", "path", "status", "certificate", "serial", "subject", "node")


class FrontLog:
    """Reads nginx's log as it grows; where it has got to is on the disk, so that a killed server misses nothing."""

    def __init__(self, access_log: Path, audit: AuditLog) -> None:
        self.path, self.audit = access_log, audit
        self.place = access_log.with_name("access.offset")
        self.offset = int(self.place.read_text()) if self.place.exists() else 0

    def look(self) -> dict[str, dict[str, Any]]:
        """Audit what was refused since the last look; returns the last good request of each node."""
        refused: Counter[tuple[Any, ...]] = Counter()
        seen: dict[str, dict[str, Any]] = {}
        for line in self.new_lines():
            if line.get("node") and line.get("status") in GOOD:
                seen[str(line["node"])] = line
            elif line.get("status") != 200:
                refused[tuple(line.get(name) for name in WHO)] += 1
        for who, count in refused.most_common(MAX_LINES):
            self.audit.write("refused at the front", **dict(zip(WHO, who, strict=True)), count=count)
        rest = sum(refused.values()) - sum(count for _, count in refused.most_common(MAX_LINES))
        if rest:
            self.audit.write("refused at the front", count=rest, why="more kinds of requests than are listed one by one")
        return seen

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines since the last look."""
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
                # nginx appends, so what it writes next begins at the start of the emptied file.
                self.path.write_bytes(b"")
                self.offset = 0
            write_private(self.place, str(self.offset))
