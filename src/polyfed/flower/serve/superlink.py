"""Flower's SuperLink with one more lock: nobody but the front reaches Fleet, and nobody but ``polyfed serve`` reaches Control.

    python -m polyfed.flower.serve.superlink OPTIONS, those of flower-superlink

Flower 1.41 serves Fleet, Control and Runtime on one port, and Control asks nobody for an account: any user of the machine could start
runs. Here each request must carry the secret of its part, which lies in a file that only this account may read. Runtime asks for
Flower's own secret (``--superexec-auth-secret-file``) and task tokens; what is none of the three is not there. Refusals are audited.
The lock is put in by Flower's hook for extensions.
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
    """ASGI middleware that asks for the secret of each part."""

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
    # Flower ends processes by the name of their program.
    sys.argv[0] = "flower-superlink"
    flower_superlink()


if __name__ == "__main__":
    main()
