"""The server's list of nodes: who was invited, who has enrolled with which keys, and who was revoked.

The front lets in exactly those certificates that stand here as enrolled, each only together with the Flower key that was enrolled with
it. So a revoked node is out when the list is read again, and no list of revocations can run out of date.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.errors import SettingError, nearest
from polyfed.flower.deploy.certificates import BadRequest, Signed, pem, read_public_key, serial_of, sign_request
from polyfed.flower.deploy.kit import NAME
from polyfed.flower.deploy.private_files import write_private

INVITED, ENROLLED, REVOKED = "invited", "enrolled", "revoked"
FILE, LOCK = "nodes.json", "nodes.lock"


@dataclass
class NodeRecord:
    """One node as the server knows it."""

    name: str  # given by the server
    state: str = INVITED
    token: str = ""  # hash of the one-time token
    serial: str = ""  # of its certificate
    before: str = ""  # serial of the certificate before, which counts until the new one was seen: a renewal can be repeated
    key: str = ""  # its Flower key
    request: str = ""  # hash of the certificate request and key that the token was used with
    certificate: str = ""
    ends: str = ""  # when the certificate does
    client: str = ""  # name under which it said that it takes part in runs; nobody else may use it

    @property
    def serials(self) -> list[str]:
        """The certificates with which the node may come in."""
        return [serial for serial in (self.serial, self.before) if serial] if self.state == ENROLLED else []


@dataclass
class NodeRegistry:
    """The list in a folder. Every change is made under a lock and written whole."""

    folder: Path
    nodes: dict[str, NodeRecord] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> NodeRegistry:
        """The list as it is now; empty where there is none yet."""
        path = folder / FILE
        if not path.exists():
            return cls(folder)
        try:
            return cls(folder, {name: NodeRecord(**values) for name, values in json.loads(path.read_text()).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingError(f"{path} cannot be read ({error}). Bring back a copy of it.") from error

    @classmethod
    @contextmanager
    def changed(cls, folder: Path) -> Iterator[NodeRegistry]:
        """The list, to be changed: nobody else changes it meanwhile, and it is written at the end."""
        with (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = cls.read(folder)
            before = found.text()
            yield found
            if found.text() != before:
                write_private(folder / FILE, found.text())

    def text(self) -> str:
        return json.dumps({name: dataclasses.asdict(record) for name, record in self.nodes.items()}, indent=1)

    def invite(self, name: str) -> str:
        """Let a node enrol, for the first time or again with other keys; returns its new one-time token."""
        if not NAME.fullmatch(name):
            raise SettingError(f"A node's name has small letters, digits and hyphens, 63 at most; found {name!r}.")
        token = secrets.token_urlsafe(32)
        client = self.nodes[name].client if name in self.nodes else ""
        self.nodes[name] = NodeRecord(name, token=hashed(token), client=client)
        return token

    def revoke(self, name: str) -> NodeRecord:
        """Let a node in no more; its certificate and its token are worth nothing from now on, and others may use its client's name."""
        if name not in self.nodes:
            raise SettingError(f"There is no node {name!r}. {nearest(name, self.nodes)}")
        self.nodes[name] = dataclasses.replace(self.nodes[name], state=REVOKED, token="", before="", client="")
        return self.nodes[name]

    def enrol(self, authority: Signed, token: str, request: bytes, key: bytes, client: str = "") -> NodeRecord:
        """Enrol who brings an unused token. The same token with the same keys gives the same certificate: an answer may have been lost."""
        found = [record for record in self.nodes.values() if record.token and hmac.compare_digest(record.token, hashed(token))]
        if not found:
            raise BadRequest("its token is not known, or was used")
        record, mark = found[0], hashed(request.decode(errors="replace") + key.decode(errors="replace"))
        if record.state == ENROLLED and record.request == mark:
            return record
        if record.state != INVITED:
            raise BadRequest(f"the token of {record.name} was used before, with other keys")
        if holder := self.other_holder(client, record.name):
            raise BadRequest(f"{client} is the name of {holder}; another client's name is needed (client in node.toml)")
        signed = self._signed(authority, record, request, read_public_key(key).decode(), mark)
        self.nodes[record.name] = dataclasses.replace(signed, client=client)
        return self.nodes[record.name]

    def renew(self, authority: Signed, serial: str, request: bytes) -> NodeRecord:
        """A new certificate for a node that shows its old one; its Flower key stays."""
        record = self.certified(serial)
        new = self._signed(authority, record, request, record.key, record.request)
        self.nodes[record.name] = dataclasses.replace(new, before=serial)
        return self.nodes[record.name]

    def keys(self) -> dict[str, str]:
        """The names of enrolled nodes by their Flower keys."""
        return {record.key: record.name for record in self.nodes.values() if record.state == ENROLLED}

    def client_names(self) -> dict[str, str]:
        return {record.client: record.name for record in self.nodes.values() if record.client}

    def other_holder(self, client: str, name: str) -> str:
        """Which node has a client's name other than the node with this name; empty: none. Nodes' own names count as well."""
        holder = client if client in self.nodes else self.client_names().get(client, "")
        return "" if holder == name else holder

    def certified(self, serial: str) -> NodeRecord:
        """The enrolled node with this certificate."""
        for record in self.nodes.values():
            if serial and serial in record.serials:
                return record
        raise BadRequest("its certificate does not belong to an admitted node")

    def _signed(self, authority: Signed, record: NodeRecord, request: bytes, key: str, mark: str) -> NodeRecord:
        certificate = sign_request(authority, request, record.name)
        values: dict[str, Any] = {
            "state": ENROLLED,
            "serial": serial_of(certificate),
            "key": key,
            "request": mark,
            "certificate": pem(certificate).decode(),
            "ends": certificate.not_valid_after_utc.isoformat(timespec="seconds"),
        }
        return dataclasses.replace(record, **values)


def hashed(text: str) -> str:
    """The hash under which a token is stored; tokens are random, so no salt is needed."""
    return hashlib.sha256(text.encode()).hexdigest()


def days_left(record: NodeRecord) -> int | None:
    if not record.ends:
        return None
    return (datetime.datetime.fromisoformat(record.ends) - datetime.datetime.now(datetime.UTC)).days
