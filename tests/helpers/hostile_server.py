"""A server that means harm, with real processes: it has the server's secrets, and sends nodes whatever a test says.

    with hostile_server(folder) as server:
        server.deployed.join("node-1", ...)
        with server.run(settings) as run:
            answer = run.ask("node-1", {"what": "train", ...})

Each run is one of a real SuperLink. Its ServerApp (``helpers/hostile_app.py``) connects to the test and passes messages on: from the test
over SuperLink and front to a node, and the answer back. Nodes do not look at the ServerApp that a bundle names: it is the server's business.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.deployed import DATA, DOMAINS, LONG, Deployed, on_loopback
from helpers.flower_fakes import FakeGrid, over
from helpers.hostile_app import ASK, CATEGORY, CLIENTS, HERE, LEAST, NODE, PORT, RUN, SAID, SERVER_APP
from helpers.paths import TESTS
from polyfed.flower.app import write_app
from polyfed.flower.deploy.folders import ServerFolder
from polyfed.flower.deploy.processes import free_port
from polyfed.flower.serve.control import Control
from polyfed.flower.server.backend import FlowerBackend
from polyfed.flower.wire.codec import Encoder
from polyfed.flower.wire.message import WireMessage, receive, send
from polyfed.runs.folder.audit_log import lines_of
from polyfed.settings import Settings


@dataclass
class HostileRun:
    """A run whose ServerApp waits for what the test says."""

    number: int
    connection: socket.socket
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Of nodes, by their names."""

    def ask(self, node: str, asked: WireMessage | Mapping[str, Any], category: str = "train") -> WireMessage:
        """Send a node this, and return its answer."""
        asked = asked if isinstance(asked, WireMessage) else WireMessage(asked)
        send(self.connection, WireMessage({NODE: self.numbers[node], CATEGORY: category, ASK: dict(asked.control)}, asked.blobs))
        return receive(self.connection)

    def refused(self, node: str, asked: WireMessage | Mapping[str, Any], category: str = "train") -> str:
        """The sentence with which a node refuses."""
        control = self.ask(node, asked, category).control
        assert not control["ok"], control
        return str(control["problem"])

    def gathered(self, least: int) -> tuple[list[str], list[str]]:
        """Who may take part by the word of polyfed's own server, and what it says of the others."""
        send(self.connection, WireMessage({LEAST: least}))
        control = receive(self.connection).control
        return control[CLIENTS], control[SAID]


@dataclass
class HostileServer:
    """A deployment whose ``polyfed serve`` waits for nodes that never come, while runs are started past it."""

    deployed: Deployed
    listener: socket.socket
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def folder(self) -> ServerFolder:
        return ServerFolder(self.deployed.server_folder)

    @contextlib.contextmanager
    def control(self) -> Iterator[Control]:
        text = (self.deployed.server_folder / "front/nginx.conf").read_text()
        port = int(text.split("upstream superlink {")[1].split("127.0.0.1:")[1].split(";")[0])
        control = Control(port, self.folder.link_certificates / "ca.crt", self.folder.control_secret)
        with contextlib.closing(control.client):
            yield control

    @contextlib.contextmanager
    def run(self, settings: Settings) -> Iterator[HostileRun]:
        """A run with these settings, to the end of the ``with`` block."""
        with self.control() as control:
            number = control.start(self.app(settings), {"min-nodes": 3})
            numbers = json.loads(self.folder.node_numbers.read_text())
            with called(self.listener) as run:
                assert run.number == number
                run.numbers = {name: int(node) for node, name in numbers.items()}
                yield run
            completed, how = self.end_of(number, control)
            assert completed, how

    def app(self, settings: Settings) -> Path:
        number = next(self.numbers)
        folder = self.deployed.folder / f"hostile-{number}"
        write_app(folder, settings, f"hostile-{number}", SERVER_APP)
        return folder

    def end_of(self, run: int, control: Control) -> tuple[bool, str]:
        end = time.monotonic() + LONG
        while (ended := control.ended(run)) is None:
            assert time.monotonic() < end
            time.sleep(0.2)
        return ended

    def audited(self, node: str, event: str = "refused") -> list[str]:
        """The reasons in the lines of a kind in a node's audit log."""
        return [line["why"] for line in lines_of(self.deployed.folder / node / "audit.jsonl") if line["event"] == event]


def honest_ask(settings: Settings, folder: Path, what: str = "train") -> WireMessage:
    """What an honest server would ask the first node: made over a Grid in this process, whose nodes have the same data."""
    configs = {number: {"data": DATA, "domain": name} for number, name in enumerate(DOMAINS[:2], 1)}
    experiment = over(FakeGrid(settings, folder / "grid", configs), settings)
    assert isinstance(experiment.backend, FlowerBackend)
    client = experiment.server.client_ids[0]
    return experiment.backend.message_for(Encoder(), experiment.server.request(what, [client]), client)


@contextlib.contextmanager
def called(listener: socket.socket) -> Iterator[HostileRun]:
    """The run whose ServerApp calls next; it ends with the ``with`` block."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(LONG)
        yield HostileRun(int(receive(connection).control[RUN]), connection)


@contextlib.contextmanager
def listening() -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """Where ServerApps call, and the environment that tells them."""
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(LONG)
        yield listener, {PORT: str(listener.getsockname()[1]), "PYTHONPATH": str(TESTS)}


@contextlib.contextmanager
def hostile_server(folder: Path, nodes: int = 9) -> Iterator[HostileServer]:
    """A server on loopback, with kits for its nodes."""
    with pytest.MonkeyPatch.context() as patch, listening() as (listener, variables):
        for name, value in variables.items():
            patch.setenv(name, value)
        with Deployed(folder, on_loopback(["server", "node"]), free_port()) as deployed:
            deployed.serve("fedbn", nodes)
            yield HostileServer(deployed, listener)
