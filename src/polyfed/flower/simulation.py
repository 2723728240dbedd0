"""``--backend flower``: virtual nodes on Flower's simulation runtime (Ray), for clusters that have one.

Flower wants to be the caller: its runtime starts a ServerApp and ends with it, and ``flwr run`` on a local profile does so in processes
of its own behind a SuperLink that stays, so that no result could come back. polyfed's loop is the caller here as everywhere: the
runtime runs in a thread, its ServerApp does nothing but lend the Grid out, and returns when the backend is closed. The entry used is
the one that ``flwr-simulation`` itself uses in 1.41 (``run_simulation``, the public one, is deprecated and only wraps it).

What clients keep lies in the run folder, which all machines of the cluster must share, or in a temporary folder without one.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from polyfed.core.code_gate import allow, code_in
from polyfed.errors import ClientFailure, DataError, MissingExtra, PolyfedError, SettingError

if find_spec("flwr") is None or find_spec("ray") is None:
    raise MissingExtra("--backend flower needs Flower with its simulation. Install it with: pip install 'polyfed[flower]'")
# Nothing is reported to anybody unless the user wants it.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
# What Ray will do by itself in later versions; it warns until it is set.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

from flwr.app import ConfigRecordValues, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.telemetry import EventType

from polyfed.backends.base import Backend, Outcome
from polyfed.core.conversation import Ask
from polyfed.core.data_types import ClientData
from polyfed.core.workbench import ClientState, Workbench
from polyfed.flower.backend import FlowerBackend
from polyfed.flower.client_app import make_app
from polyfed.flower.node import build_node, counts_of
from polyfed.flower.roster import Description, Roster
from polyfed.flower.transport import Transport
from polyfed.flower.wire_message import WireMessage
from polyfed.runs.client_state_files import NODES, read_states
from polyfed.settings import Settings

log = logging.getLogger("polyfed")
START_LIMIT = 300.0
END_LIMIT = 60.0


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
        """End the runtime."""
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

    def keep_in(self, folder: Path) -> None:
        self.home = folder.resolve() / NODES

    def outcomes(self, ask: Ask, clients: Sequence[str]) -> Iterator[Outcome]:
        if self.runtime is None:
            self.start()
        yield from super().outcomes(ask, clients)

    def start(self) -> None:
        """Start the runtime and learn which virtual node is which client."""
        if self.home is None:
            self.home = Path(tempfile.mkdtemp(prefix="polyfed-nodes-"))
            atexit.register(shutil.rmtree, self.home, ignore_errors=True)
        self.runtime = Runtime(virtual_app(self.bench.settings, self.home), len(self.data), self.bench.settings)
        self.roster = Roster(RuntimeTransport(self.runtime))
        try:
            for described in self.roster.gather(len(self.data), START_LIMIT):
                self.check(described)
        except PolyfedError:
            self.close()
            raise

    def check(self, described: Description) -> None:
        """Refuse a node that built something else than the server."""
        known = self.data.get(described.client)
        if known is None or counts_of(known.train, self.bench.classes) != list(described.class_counts):
            raise DataError(
                f"A virtual node built other data for client {described.client} than the server has. Do all machines see the same files?"
            )

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
    """The backend of ``--backend flower``."""
    if bench.settings.flower_cpus <= 0:
        raise SettingError("--flower-cpus must be more than 0 with --backend flower: it decides how many clients train at a time.")
    return Simulated(bench, clients)


def virtual_app(settings: Settings, home: Path) -> ClientApp:
    """A ClientApp whose nodes build what the settings say, and keep their state in one folder."""
    plain = dataclasses.replace(settings, backend="process", load=tuple(str(Path(file).resolve()) for file in settings.load))

    def work(wire_message: WireMessage, context: Context) -> WireMessage:
        allow(code_in(plain.load, plain.model))  # this is a process of Ray: the one that started it has passed the gate
        return build_node(plain, context.node_config, home).answer(wire_message)

    return make_app(work)
