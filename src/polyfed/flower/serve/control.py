"""Requests of ``polyfed serve`` to its SuperLink: register nodes, start a run and follow it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

from polyfed.errors import SettingError
from polyfed.flower.serve.front import SECRET_HEADER

log = logging.getLogger("polyfed")

FINISHED, COMPLETED = "finished", "completed"
TRIES = 20  # attempts for a request to a busy SuperLink; each times out after half a minute
Request = TypeVar("Request")
Reply = TypeVar("Reply")


def _retry(call: Callable[[Request], Reply], request: Request) -> Reply:
    """Send an idempotent request, and retry it after a timeout, since the machine may be busy."""
    for _ in range(TRIES - 1):
        try:
            return call(request)
        except httpx.TimeoutException:
            log.warning("The SuperLink did not reply in time. Retrying.")
    return call(request)


class WithSecret:
    """Interceptor that adds the secret to every request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[SECRET_HEADER] = self.secret
        return call_next(context)


class Control:
    """Client of the Control API of a SuperLink."""

    def __init__(self, port: int, authority: Path, secret: str) -> None:
        self.client = ControlHttpClient.from_server_address(
            f"127.0.0.1:{port}",
            insecure=False,
            root_certificates=authority.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), WithSecret(secret)],
        )

    def is_ready(self) -> bool:
        try:
            self.client.ListNodes(ListNodesRequest())
        except httpx.TransportError:
            return False
        return True

    def nodes(self) -> dict[str, tuple[int, bool]]:
        """Return number and connection status of the registered nodes, by key."""
        nodes = _retry(self.client.ListNodes, ListNodesRequest()).nodes_info
        return {
            node.public_key.decode(): (node.node_id, node.status == "online") for node in nodes if node.status != "unregistered"
        }

    def register(self, key: str, name: str) -> None:
        self.client.RegisterNode(RegisterNodeRequest(public_key=key.encode(), name=name))

    def unregister(self, node: int) -> None:
        self.client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def start(self, app: Path, config: Mapping[str, Any]) -> int:
        """Start a run of an app folder and return its number."""
        bundle = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
        reply = self.client.StartRun(request)
        if not reply.HasField("run_id"):
            raise SettingError(f"The SuperLink did not start the run. {reply.note}")
        return int(reply.run_id)

    def log_of(self, run: int) -> Iterator[str]:
        latest = 0.0
        while True:
            try:
                for part in self.client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=latest)):
                    latest = max(latest, part.latest_timestamp)
                    yield part.log_output
                return
            except httpx.TimeoutException:
                log.warning("The connection to the run's log was lost. Reconnecting.")

    def ended(self, run: int) -> tuple[bool, str] | None:
        """Return True if a run completed, and its final status; None while it is running."""
        status = _retry(self.client.ListRuns, ListRunsRequest(run_id=run)).run_dict[run].status
        if status.status != FINISHED:
            return None
        return status.sub_status == COMPLETED, f"{status.sub_status}: {status.details}".strip(": ")

    def stop_others(self) -> None:
        """Stop runs that remain from a killed server."""
        for number, run in _retry(self.client.ListRuns, ListRunsRequest()).run_dict.items():
            if run.status.status != FINISHED:
                self.client.StopRun(StopRunRequest(run_id=number))
