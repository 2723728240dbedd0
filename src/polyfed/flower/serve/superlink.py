"""Flower's SuperLink (``python -m``) with secrets: only the reverse proxy can use Fleet, and only ``polyfed serve`` can use Control.

Flower 1.41 serves Fleet, Control and Runtime on one port, and Control requires no account, so any user of the machine could start runs.
Runtime requires Flower's secret and task tokens.
"""

from __future__ import annotations

import hmac
import sys
from collections.abc import Mapping
from typing import Any

from flwr.superlink import extensions
from flwr.superlink.cli.flower_superlink import flower_superlink
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from polyfed.flower.deploy.folders import ServerFolder
from polyfed.flower.serve.front import SECRET_HEADER
from polyfed.runs.folder.audit_log import AuditLog

FLEET, CONTROL, RUNTIME = "/v1/fleet/", "/v1/control/", "/v1/runtime/"


class Lock:
    """ASGI middleware that requires the secret of each API."""

    def __init__(self, app: ASGIApp, secrets: Mapping[str, bytes], audit: AuditLog) -> None:
        self.app, self.secrets, self.audit = app, secrets, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self.may_pass(scope)):
            await self.app(scope, receive, send)
            return
        host, _ = scope.get("client") or ("", 0)
        self.audit.write("request past the front refused", address=host, request=scope.get("method"), path=scope.get("path"))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    def may_pass(self, scope: Mapping[str, Any]) -> bool:
        path = str(scope["path"])
        if path.startswith(RUNTIME):
            return True
        part = next((part for part in self.secrets if path.startswith(part)), None)
        given = next((value for name, value in scope["headers"] if name == SECRET_HEADER.lower().encode()), b"")
        return part is not None and hmac.compare_digest(given, self.secrets[part])


def main() -> None:
    folder = ServerFolder.of_this_process()
    secrets = {FLEET: folder.front_secret.encode(), CONTROL: folder.control_secret.encode()}
    locked = Middleware(Lock, secrets=secrets, audit=AuditLog(folder.audit))
    extensions.get_middleware = lambda: (locked,)
    # Flower finds its processes by program name.
    sys.argv[0] = "flower-superlink"
    flower_superlink()


if __name__ == "__main__":
    main()
