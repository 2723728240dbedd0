"""``--backend flower``: virtual nodes on Flower's simulation runtime (Ray), for clusters.

The runtime runs in a thread, and its ServerApp only hands over the Grid, so that polyfed's loop stays the caller. The public
``run_simulation`` of Flower 1.41 is deprecated and only wraps ``_run_simulation``. Every Ray actor builds the whole federation and
the model once, and replies for any client. Several clients share a message, because the runtime has a high cost per message.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import math
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyfed.errors import ClientFailure, DataError, MissingExtra, NotFinite, SettingError

if find_spec("flwr") is None or find_spec("ray") is None:
    raise MissingExtra("--backend flower requires Flower with its simulation. Install it with: pip install 'polyfed[flower]'")
# No telemetry unless the user enables it.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
# The default of later Ray versions; Ray warns until it is set.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from flwr.app import ConfigRecordValues, Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.telemetry import EventType

from polyfed.backends.base import Backend, Outcome
from polyfed.core.data_types import ClientData
from polyfed.core.rounds import Request
from polyfed.core.workbench import ClientState, Workbench
from polyfed.flower.client_app import make_app
from polyfed.flower.node.node import Node, counts_of, shared_workplace
from polyfed.flower.server.backend import CATEGORIES, FlowerBackend
from polyfed.flower.server.roster import Roster, read_reply
from polyfed.flower.wire.codec import Encoder
from polyfed.flower.wire.message import BUNDLE, BadMessage, WireMessage, bundled, refusal, unbundled
from polyfed.flower.wire.transport import Transport
from polyfed.runs.folder.client_state_files import NODES, read_states
from polyfed.settings import Settings

log = logging.getLogger("polyfed")
START_LIMIT = 300.0
END_LIMIT = 60.0
MESSAGES_PER_ACTOR = 2
MIN_NODES, MAX_NODES = 8, 256
LARGEST_MESSAGE = 256 * 1024 * 1024
COUNTS, OTHER_DATA = "counts", "other_data"


class Runtime:
    """Flower's simulation runtime in a thread. ``grid`` reaches its virtual nodes until ``close``."""

    def __init__(self, app: ClientApp, nodes: int, settings: Settings) -> None:
        self.app, self.nodes, self.settings = app, nodes, settings
        self.started: queue.Queue[Grid | BaseException] = queue.Queue()
        self.closed = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="flower-simulation", daemon=True)
        self.thread.start()
        try:
            found = self.started.get(timeout=START_LIMIT)
        except queue.Empty as error:
            raise SettingError(f"Flower's simulation did not start within {START_LIMIT:g} s.") from error
        if isinstance(found, BaseException):
            raise SettingError(f"Flower's simulation did not start: {found}") from found
        self.grid: Grid = found
        self._await_nodes()

    def _await_nodes(self) -> None:
        """Wait until Flower has registered all nodes; earlier requests would not reach them."""
        deadline = time.monotonic() + START_LIMIT
        while (found := len(list(self.grid.get_node_ids()))) < self.nodes:
            if self.error is not None:
                raise SettingError(f"Flower's simulation did not start: {self.error}") from self.error
            if time.monotonic() >= deadline:
                self.close()
                raise SettingError(f"Flower's simulation has {found} of {self.nodes} nodes after {START_LIMIT:g} s.")
            time.sleep(0.01)

    def _run(self) -> None:
        server = ServerApp()

        @server.main()
        def hand_over(grid: Grid, context: Context) -> None:
            self.started.put(grid)
            self.closed.wait()

        resources: dict[str, ConfigRecordValues] = {"num_cpus": self.settings.flower_cpus, "num_gpus": self.settings.flower_gpus}
        try:
            _run_simulation(
                num_supernodes=self.nodes,
                exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                client_app=self.app,
                server_app=server,
                backend_config={"client_resources": resources, "init_args": {"logging_level": "ERROR", "log_to_driver": False}},
            )
        except BaseException as error:
            self.error = error
            self.started.put(error)
            self.closed.set()

    def close(self) -> None:
        self.closed.set()
        self.thread.join(END_LIMIT)
        if self.thread.is_alive():
            log.warning("Flower's simulation did not end within %g s.", END_LIMIT)


class RuntimeTransport(Transport):
    """The transport to virtual nodes; it fails when their runtime ends."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.grid)
        self.runtime = runtime

    def check(self) -> None:
        if not self.runtime.thread.is_alive():
            raise ClientFailure(f"Flower's simulation ended in the middle of the run: {self.runtime.error or 'unknown reason'}.")


class Simulated(FlowerBackend):
    """A backend with virtual nodes. A request starts the runtime if necessary; ``close`` ends it."""

    def __init__(self, bench: Workbench, clients: Collection[ClientData]) -> None:
        super().__init__(bench, clients, Roster(_NotStarted()))
        self.home: Path | None = None
        self.runtime: Runtime | None = None
        self.counts = {client.id: counts_of(client.train, bench.task, bench.classes) for client in clients}

    def keep_in(self, folder: Path) -> None:
        self.home = folder.resolve() / NODES

    def outcomes(self, request: Request, clients: Sequence[str]) -> Iterator[Outcome]:
        runtime = self.runtime or self.start()
        encoder, transport = Encoder(), RuntimeTransport(runtime)
        nodes = sorted(runtime.grid.get_node_ids())
        # A few messages per actor, and more if one would be too large.
        wanted = max(self.min_messages(len(clients)), MESSAGES_PER_ACTOR * actors(self.bench.settings))
        groups = dict(zip(nodes, divided(clients, max(1, min(len(nodes), len(clients), wanted))), strict=False))
        messages = {node: [self.message_for(encoder, request, client) for client in group] for node, group in groups.items()}
        versions = {message.control["client"]: message.control["version"] for group in messages.values() for message in group}
        bundles = {node: bundled(group) for node, group in messages.items()}
        sent = transport.send(bundles, CATEGORIES.get(request.purpose, MessageType.QUERY), str(request.round), self.timeout)
        del messages, bundles, encoder
        for node, group in groups.items():
            for client, reply in zip(group, self.replies(transport.wait(sent[node]), node, len(group)), strict=True):
                try:
                    outcome = self.outcome(reply, client, versions[client])
                except NotFinite as error:
                    error.locate(client, request.round)
                    raise
                yield outcome

    def min_messages(self, clients: int) -> int:
        """Return the number of messages at which none is too large."""
        model = sum(entry.size for entry in self.bench.plan.entries.values())
        return math.ceil(clients * model / LARGEST_MESSAGE)

    def message_for(self, encoder: Encoder, request: Request, client: str) -> WireMessage:
        message = super().message_for(encoder, request, client)
        return WireMessage({**message.control, COUNTS: self.counts[client]}, message.blobs)

    def replies(self, message: Message | None, node: int, count: int) -> list[WireMessage]:
        """Return the bundled replies, or the same refusal for each client if there are none."""
        try:
            reply = read_reply(message, node, self.timeout)
            replies = unbundled(reply) if BUNDLE in reply.control else [reply] * count
            if len(replies) != count:
                raise BadMessage(f"it sent {len(replies)} of {count} replies")
        except BadMessage as error:
            return [refusal(f"{error}.")] * count
        return replies

    def refused(self, client: str, control: Mapping[str, Any]) -> Outcome:
        if control.get("kind") == OTHER_DATA:
            raise DataError(str(control.get("problem")))
        if control.get("kind") == "not_finite" and self.bench.settings.on_nan == "stop":
            raise NotFinite(str(control.get("problem")))
        return super().refused(client, control)

    def start(self) -> Runtime:
        if self.home is None:
            self.home = Path(tempfile.mkdtemp(prefix="polyfed-nodes-"))
            atexit.register(shutil.rmtree, self.home, ignore_errors=True)
        clients = len(self.data)
        on_a_cluster = ray.is_initialized() or os.environ.get("RAY_ADDRESS")
        # The runtime polls each virtual node ten times per second.
        max_nodes = MAX_NODES if on_a_cluster else max(MESSAGES_PER_ACTOR * (os.cpu_count() or 1), MIN_NODES)
        nodes = min(clients, max(max_nodes, self.min_messages(clients)))
        self.runtime = Runtime(_virtual_app(self.bench.settings, self.home), nodes, self.bench.settings)
        return self.runtime

    def state_of(self, client: str) -> ClientState:
        if self.home is None or client not in self.client_states:
            return super().state_of(client)
        return read_states(self.home, {client: self.client_states[client]})[client]

    def close(self) -> None:
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None


class _NotStarted(Transport):
    def __init__(self) -> None:
        pass


def simulated(bench: Workbench, clients: Collection[ClientData]) -> Backend:
    if bench.settings.flower_cpus <= 0:
        raise SettingError(
            "--flower-cpus must be greater than 0 with --backend flower, because it sets how many clients train in parallel."
        )
    return Simulated(bench, clients)


def _virtual_app(settings: Settings, home: Path) -> ClientApp:
    plain = dataclasses.replace(settings, backend="process", load=tuple(str(Path(file).resolve()) for file in settings.load))

    def work(wire_message: WireMessage, context: Context) -> WireMessage:
        return bundled([_reply(plain, home, message) for message in unbundled(wire_message)])

    return make_app(work)


def _reply(settings: Settings, home: Path, wire_message: WireMessage) -> WireMessage:
    client = str(wire_message.control["client"])
    place = shared_workplace(settings)
    data = next((data for data in place.federation.clients if data.id == client), None)
    if data is None or counts_of(data.train, place.federation.task, len(place.federation.classes)) != wire_message.control[COUNTS]:
        problem = (
            f"Client {client} has different data at the server and at a virtual node. Give all machines access to the same files."
        )
        return refusal(problem, OTHER_DATA)
    return Node(place, data, home).answer(wire_message)


def divided(clients: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    """Split the clients in order into groups whose sizes differ by at most one."""
    edges = [len(clients) * index // count for index in range(count + 1)]
    return (clients[start:end] for start, end in itertools.pairwise(edges))


def actors(settings: Settings) -> int:
    """Return the number of clients that Ray's resources allow to train in parallel."""
    available = ray.cluster_resources() if ray.is_initialized() else {}
    needed = {"CPU": settings.flower_cpus, "GPU": settings.flower_gpus}
    return max(1, min(int(available.get(name, 1) // amount) for name, amount in needed.items() if amount))
