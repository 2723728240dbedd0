"""The server's registry of invited, enrolled and revoked nodes; the reverse proxy accepts exactly the enrolled certificates."""

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
    name: str  # given by the server
    state: str = INVITED
    token: str = ""  # hash of the one-time token
    serial: str = ""  # serial number of its certificate
    before: str = ""  # previous serial, valid until the new certificate is used, so that a renewal can be repeated
    key: str = ""  # its Flower key
    request: str = ""  # hash of the certificate request and key sent with the token
    certificate: str = ""
    ends: str = ""  # expiry of the certificate
    client: str = ""  # client name that is reserved for this node

    @property
    def serials(self) -> list[str]:
        """Serial numbers of the certificates with which the node may connect."""
        return [serial for serial in (self.serial, self.before) if serial] if self.state == ENROLLED else []


@dataclass
class NodeRegistry:
    """The registry in a folder. Changes are locked and atomic."""

    folder: Path
    nodes: dict[str, NodeRecord] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> NodeRegistry:
        path = folder / FILE
        if not path.exists():
            return cls(folder)
        try:
            return cls(folder, {name: NodeRecord(**values) for name, values in json.loads(path.read_text()).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingError(f"Cannot read {path} ({error}). Restore it from a backup.") from error

    @classmethod
    @contextmanager
    def changed(cls, folder: Path) -> Iterator[NodeRegistry]:
        """Lock the registry for changes, and write it at the end."""
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
        """Allow a node to enrol, or to enrol again with new keys. Return its new one-time token."""
        if not NAME.fullmatch(name):
            raise SettingError(f"Node names consist of at most 63 lowercase letters, digits and hyphens, got {name!r}.")
        token = secrets.token_urlsafe(32)
        client = self.nodes[name].client if name in self.nodes else ""
        self.nodes[name] = NodeRecord(name, token=hashed(token), client=client)
        return token

    def revoke(self, name: str) -> NodeRecord:
        """Invalidate a node's certificate and token, and free its client name."""
        if name not in self.nodes:
            raise SettingError(f"Unknown node {name!r}. {nearest(name, self.nodes)}")
        self.nodes[name] = dataclasses.replace(self.nodes[name], state=REVOKED, token="", before="", client="")
        return self.nodes[name]

    def enrol(self, authority: Signed, token: str, request: bytes, key: bytes, client: str = "") -> NodeRecord:
        """Enrol the node with this token. A repeated request with the same keys returns the same certificate, since a reply may be lost."""
        found = [record for record in self.nodes.values() if record.token and hmac.compare_digest(record.token, hashed(token))]
        if not found:
            raise BadRequest("its token is unknown or was used")
        record, mark = found[0], hashed(request.decode(errors="replace") + key.decode(errors="replace"))
        if record.state == ENROLLED and record.request == mark:
            return record
        if record.state != INVITED:
            raise BadRequest(f"the token of {record.name} was used with other keys")
        if owner := self.other_owner(client, record.name):
            raise BadRequest(f"the client name {client} belongs to {owner}; choose another (client in node.toml)")
        signed = self._signed(authority, record, request, read_public_key(key).decode(), mark)
        self.nodes[record.name] = dataclasses.replace(signed, client=client)
        return self.nodes[record.name]

    def renew(self, authority: Signed, serial: str, request: bytes) -> NodeRecord:
        """Issue a new certificate to a node with a valid one; its Flower key stays the same."""
        record = self.certified(serial)
        new = self._signed(authority, record, request, record.key, record.request)
        self.nodes[record.name] = dataclasses.replace(new, before=serial)
        return self.nodes[record.name]

    def keys(self) -> dict[str, str]:
        """Return the names of enrolled nodes by Flower key."""
        return {record.key: record.name for record in self.nodes.values() if record.state == ENROLLED}

    def client_names(self) -> dict[str, str]:
        return {record.client: record.name for record in self.nodes.values() if record.client}

    def other_owner(self, client: str, name: str) -> str:
        """Return the node other than ``name`` that has this client name or node name, or an empty string."""
        owner = client if client in self.nodes else self.client_names().get(client, "")
        return "" if owner == name else owner

    def certified(self, serial: str) -> NodeRecord:
        """Return the enrolled node with this certificate."""
        for record in self.nodes.values():
            if serial and serial in record.serials:
                return record
        raise BadRequest("its certificate does not belong to an enrolled node")

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
    """Hash a token for storage; tokens are random, so no salt is needed."""
    return hashlib.sha256(text.encode()).hexdigest()


def days_left(record: NodeRecord) -> int | None:
    if not record.ends:
        return None
    return (datetime.datetime.fromisoformat(record.ends) - datetime.datetime.now(datetime.UTC)).days
