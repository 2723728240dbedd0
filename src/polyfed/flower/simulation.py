"""``--backend flower``: virtual nodes on Flower's simulation runtime (Ray), for clusters that have one.

Flower wants to be the caller: its runtime starts a ServerApp and ends with it, and ``flwr run`` on a local profile does so in processes
of its own behind a SuperLink that stays, so that no result could come back. polyfed's loop is the caller here as everywhere: the
runtime runs in a thread, its ServerApp does nothing but lend the Grid out, and returns when the backend is closed. The entry used is
the one that ``flwr-simulation`` itself uses in 1.41 (``run_simulation``, the public one, is deprecated and only wraps it).

A virtual node is no client: every actor of Ray builds the whole federation and the model once, keeps them, and answers for any client.
The clients of an ask are divided among a few messages, so that the runtime's cost for a message is not paid for each client.

What clients keep lies in the run folder, which all machines of the cluster must share, or in a temporary folder without one.
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
    raise MissingExtra("--backend flower needs Flower with its simulation. Install it with: pip install 'polyfed[flower]'")
# Nothing is reported to anybody unless the user wants it.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
# What Ray will do by itself in later versions; it warns until it is set.
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
from polyfed.flower.server.roster import Roster, read_answer
from polyfed.flower.wire.codec import Encoder
from polyfed.flower.wire.message import BUNDLE, BadMessage, WireMessage, bundled, refusal, unbundled
from polyfed.flower.wire.transport import Transport
from polyfed.runs.folder.client_state_files import NODES, read_states
from polyfed.settings import Settings

log = logging.getLogger("polyfed")
START_LIMIT = 300.0
END_LIMIT = 60.0
MESSAGES_FOR_AN_ACTOR = 2
MIN_NODES, MAX_NODES = 8, 256
LARGEST_MESSAGE = 256 * 1024 * 1024
COUNTS, OTHER_DATA = "counts", "other_data"


class Runtime:
    """Flower's simulation runtime, in a thread; ``grid`` reaches its virtual nodes until ``close``."""

    def __init__(self, app: ClientApp, nodes: int, settings: Settings) -> None:
        self.app, self.nodes, self.settings = app, nodes, settings
        self.lent: queue.Queue[Grid | BaseException] = queue.Queue()
        self.over = threading.Event()
        self.ended_with: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="flower-simulation", daemon=True)
        self.thread.start()
        try:
            found = self.lent.get(timeout=START_LIMIT)
        except queue.Empty as error:
            raise SettingError(f"Flower's simulation did not start within {START_LIMIT:g} s.") from error
        if isinstance(found, BaseException):
            raise SettingError(f"Flower's simulation did not start: {found}") from found
        self.grid: Grid = found
        self._await_nodes()

    def _await_nodes(self) -> None:
        """Flower lends the Grid out while it still registers its nodes; an ask before that would reach nobody."""
        deadline = time.monotonic() + START_LIMIT
        while (found := len(list(self.grid.get_node_ids()))) < self.nodes:
            if self.ended_with is not None:
                raise SettingError(f"Flower's simulation did not start: {self.ended_with}") from self.ended_with
            if time.monotonic() >= deadline:
                self.close()
                raise SettingError(f"Flower's simulation has {found} of {self.nodes} nodes after {START_LIMIT:g} s.")
            time.sleep(0.01)

    def _run(self) -> None:
        server = ServerApp()

        @server.main()
        def lend(grid: Grid, context: Context) -> None:
            self.lent.put(grid)
            self.over.wait()

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
            self.ended_with = error
            self.lent.put(error)
            self.over.set()

    def close(self) -> None:
        self.over.set()
        self.thread.join(END_LIMIT)
        if self.thread.is_alive():
            log.warning("Flower's simulation did not end within %g s.", END_LIMIT)


class RuntimeTransport(Transport):
    """The transport to virtual nodes; it knows when their runtime has ended by itself."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime.grid)
        self.runtime = runtime

    def check(self) -> None:
        if not self.runtime.thread.is_alive():
            raise ClientFailure(
                f"Flower's simulation ended in the middle of the run: {self.runtime.ended_with or 'without a reason'}."
            )


class Simulated(FlowerBackend):
    """A backend to virtual nodes. The runtime starts with the first ask and ends with ``close``; the next ask starts it again."""

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
        # Some messages for each actor, and more where one would be too large.
        wanted = max(self.min_messages(len(clients)), MESSAGES_FOR_AN_ACTOR * actors(self.bench.settings))
        shares = dict(zip(nodes, divided(clients, max(1, min(len(nodes), len(clients), wanted))), strict=False))
        messages = {node: [self.message_for(encoder, request, client) for client in share] for node, share in shares.items()}
        versions = {message.control["client"]: message.control["version"] for share in messages.values() for message in share}
        bundles = {node: bundled(share) for node, share in messages.items()}
        sent = transport.send(bundles, CATEGORIES.get(request.purpose, MessageType.QUERY), str(request.round), self.timeout)
        del messages, bundles, encoder
        for node, share in shares.items():
            for client, answer in zip(share, self.answers(transport.wait(sent[node]), node, len(share)), strict=True):
                yield self.outcome(answer, client, versions[client])

    def min_messages(self, clients: int) -> int:
        """How many messages these clients need, so that none is too large."""
        model = sum(entry.size for entry in self.bench.plan.entries.values())
        return math.ceil(clients * model / LARGEST_MESSAGE)

    def message_for(self, encoder: Encoder, request: Request, client: str) -> WireMessage:
        message = super().message_for(encoder, request, client)
        return WireMessage({**message.control, COUNTS: self.counts[client]}, message.blobs)

    def answers(self, message: Message | None, node: int, count: int) -> list[WireMessage]:
        """The answers in a message; where there are none, each client of it says why."""
        try:
            answer = read_answer(message, node, self.timeout)
            answers = unbundled(answer) if BUNDLE in answer.control else [answer] * count
            if len(answers) != count:
                raise BadMessage(f"{len(answers)} of {count} answers came")
        except BadMessage as error:
            return [refusal(f"{error}.")] * count
        return answers

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
        # The runtime looks at each virtual node ten times a second.
        most = MAX_NODES if on_a_cluster else max(MESSAGES_FOR_AN_ACTOR * (os.cpu_count() or 1), MIN_NODES)
        nodes = min(clients, max(most, self.min_messages(clients)))
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
    """The transport before the runtime has started."""

    def __init__(self) -> None:
        pass


def simulated(bench: Workbench, clients: Collection[ClientData]) -> Backend:
    if bench.settings.flower_cpus <= 0:
        raise SettingError("--flower-cpus must be more than 0 with --backend flower: it decides how many clients train at a time.")
    return Simulated(bench, clients)


def _virtual_app(settings: Settings, home: Path) -> ClientApp:
    """A ClientApp whose nodes build what the settings say, and keep their state in one folder."""
    plain = dataclasses.replace(settings, backend="process", load=tuple(str(Path(file).resolve()) for file in settings.load))

    def work(wire_message: WireMessage, context: Context) -> WireMessage:
        return bundled([_answer_of(plain, home, message) for message in unbundled(wire_message)])

    return make_app(work)


def _answer_of(settings: Settings, home: Path, wire_message: WireMessage) -> WireMessage:
    client = str(wire_message.control["client"])
    place = shared_workplace(settings)
    data = next((data for data in place.federation.clients if data.id == client), None)
    if data is None or counts_of(data.train, place.federation.task, len(place.federation.classes)) != wire_message.control[COUNTS]:
        why = f"A virtual node built other data for client {client} than the server has. Do all machines see the same files?"
        return refusal(why, OTHER_DATA)
    return Node(place, data, home).answer(wire_message)


def divided(clients: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    """Clients in a number of shares that differ by one at most, in their order."""
    edges = [len(clients) * place // count for place in range(count + 1)]
    return (clients[begin:end] for begin, end in itertools.pairwise(edges))


def actors(settings: Settings) -> int:
    """How many clients train at a time, by what Ray has."""
    found = ray.cluster_resources() if ray.is_initialized() else {}
    wanted = {"CPU": settings.flower_cpus, "GPU": settings.flower_gpus}
    return max(1, min(int(found.get(name, 1) // amount) for name, amount in wanted.items() if amount))
