"""The enrolment service on loopback: a node sends its one-time token and a certificate request, and receives its certificate."""

from __future__ import annotations

import hmac
import http.server
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyfed.flower.deploy.certificates import BadRequest, Signed
from polyfed.flower.serve.front import ADDRESS_HEADER, ENROL_PATH, LARGEST_ENROLMENT, SECRET_HEADER, SERIAL_HEADER
from polyfed.flower.serve.registry import NodeRecord, NodeRegistry
from polyfed.flower.wire.descriptions import LONGEST_NAME, plain_text
from polyfed.runs.folder.audit_log import AuditLog

log = logging.getLogger("polyfed")

LARGEST_BODY = int(LARGEST_ENROLMENT.removesuffix("k")) * 1024
SECONDS_TO_SEND = 30.0
HELLO = {"hello": "polyfed"}


class Enrolment:
    """Handles enrolments and renewals. It calls ``changed`` when the registry has changed, before it replies to the node."""

    def __init__(self, folder: Path, authority: Signed, audit: AuditLog, changed: Callable[[], None]) -> None:
        self.folder, self.authority, self.audit, self.changed = folder, authority, audit, changed

    def answer(self, body: bytes, address: str, serial: str) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the reply to a request."""
        try:
            values = _read_body(body)
            if values == HELLO:
                # A node checks that it may connect, and compares clocks.
                return 200, {"name": NodeRegistry.read(self.folder).certified(serial).name}
            record, event = self.update(values, serial)
        except BadRequest as error:
            self.audit.write("enrolment refused", address=address, serial=serial, why=str(error))
            log.warning("Enrolment from %s was rejected: %s.", address, error)
            return 403, {"problem": f"The server rejected this node: {error}."}
        self.changed()
        self.audit.write(event, node=record.name, client=record.client, address=address, serial=record.serial, ends=record.ends)
        log.info("%s: %s from %s.", record.name, event, address)
        return 200, {"name": record.name, "certificate": record.certificate}

    def update(self, values: dict[str, str], serial: str) -> tuple[NodeRecord, str]:
        """Enrol or renew a node; return its record and the audit event."""
        request, key = values.get("request", "").encode(), values.get("key", "").encode()
        with NodeRegistry.changed(self.folder) as registry:
            if "token" in values:
                client = plain_text(values.get("client", "")[:LONGEST_NAME]).strip()
                return registry.enrol(self.authority, values["token"], request, key, client), "enrolled"
            if serial:
                return registry.renew(self.authority, serial, request), "certificate renewed"
        raise BadRequest("it sent neither a token nor a certificate")


def _read_body(body: bytes) -> dict[str, str]:
    try:
        found = json.loads(body)
        # JSON may contain half of a surrogate pair, which cannot be encoded.
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest("its request is not JSON") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadRequest("its request is not a table of strings")
    return found


class Service(http.server.ThreadingHTTPServer):
    """The HTTP service on loopback."""

    daemon_threads = True

    def __init__(self, enrolment: Enrolment, secret: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.enrolment, self.secret = enrolment, secret

    def start(self) -> int:
        """Serve in a thread and return the port."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return int(self.server_address[1])


class Handler(http.server.BaseHTTPRequestHandler):
    """Handles a request from the reverse proxy."""

    server: Service
    timeout = SECONDS_TO_SEND

    def do_POST(self) -> None:
        given = self.headers.get(SECRET_HEADER, "")
        if not hmac.compare_digest(given.encode(), self.server.secret.encode()) or self.path != ENROL_PATH:
            self.server.enrolment.audit.write(
                "enrolment past the front refused", address=str(self.client_address[0]), path=self.path
            )
            self.reply(404, {})
            return
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if 0 < length <= LARGEST_BODY else b""
        address, serial = self.headers.get(ADDRESS_HEADER, ""), self.headers.get(SERIAL_HEADER, "")
        self.reply(*self.server.enrolment.answer(body, address, serial))

    def reply(self, status: int, values: dict[str, Any]) -> None:
        content = json.dumps(values).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do nothing: the audit log records every request."""
