"""What ``polyfed serve`` asks of its SuperLink: to know nodes, to start the run, and to say how it goes."""

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
TRIES = 20
"""How often a question is asked that a busy SuperLink does not answer in time, which is half a minute each."""
Question = TypeVar("Question")
Answer = TypeVar("Answer")


def _patiently(ask: Callable[[Question], Answer], question: Question) -> Answer:
    """Request what may be asked again: a machine that is busy is no reason for a server to end."""
    for _ in range(TRIES - 1):
        try:
            return ask(question)
        except httpx.TimeoutException:
            log.warning("The SuperLink did not answer in time; it is asked again.")
    return ask(question)


class WithSecret:
    """Adds the secret to every request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers[SECRET_HEADER] = self.secret
        return call_next(context)


class Control:
    """The Control part of one SuperLink."""

    def __init__(self, port: int, authority: Path, secret: str) -> None:
        self.client = ControlHttpClient.from_server_address(
            f"127.0.0.1:{port}",
            insecure=False,
            root_certificates=authority.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), WithSecret(secret)],
        )

    def is_there(self) -> bool:
        try:
            self.client.ListNodes(ListNodesRequest())
        except httpx.TransportError:
            return False
        return True

    def nodes(self) -> dict[str, tuple[int, bool]]:
        """The registered nodes by their key: their numbers, and whether they are connected."""
        found = _patiently(self.client.ListNodes, ListNodesRequest()).nodes_info
        return {
            info.public_key.decode(): (info.node_id, info.status == "online") for info in found if info.status != "unregistered"
        }

    def register(self, key: str, name: str) -> None:
        self.client.RegisterNode(RegisterNodeRequest(public_key=key.encode(), name=name))

    def unregister(self, node: int) -> None:
        self.client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def start(self, app: Path, config: Mapping[str, Any]) -> int:
        """Start a run of an app folder; returns its number."""
        bundle = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
        started = self.client.StartRun(request)
        if not started.HasField("run_id"):
            raise SettingError(f"The SuperLink did not start the run. {started.note}")
        return int(started.run_id)

    def log_of(self, run: int) -> Iterator[str]:
        latest = 0.0
        while True:
            try:
                for part in self.client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=latest)):
                    latest = max(latest, part.latest_timestamp)
                    yield part.log_output
                return
            except httpx.TimeoutException:
                log.warning("The log of the run broke off; it goes on where it was.")

    def ended(self, run: int) -> tuple[bool, str] | None:
        """Whether a run has completed, and how it ended; None while it goes on."""
        status = _patiently(self.client.ListRuns, ListRunsRequest(run_id=run)).run_dict[run].status
        if status.status != FINISHED:
            return None
        return status.sub_status == COMPLETED, f"{status.sub_status}: {status.details}".strip(": ")

    def stop_others(self) -> None:
        """Stop what a server that was killed has left running."""
        for number, run in _patiently(self.client.ListRuns, ListRunsRequest()).run_dict.items():
            if run.status.status != FINISHED:
                self.client.StopRun(StopRunRequest(run_id=number))
