"""``polyfed serve``: start the SuperLink and the reverse proxy, write kits, wait for nodes, and train."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from polyfed.errors import PolyfedError, SettingError
from polyfed.flower.app import MIN_NODES, NEWCOMER, settings_text, write_app
from polyfed.flower.deploy.certificates import (
    CA_CERTIFICATE,
    HOST_NAME,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    create_loopback_certificates,
    is_address,
    load_authority,
    renew_server_certificate,
)
from polyfed.flower.deploy.folders import ServerFolder
from polyfed.flower.deploy.kit import SUFFIX, Kit
from polyfed.flower.deploy.private_files import write_private
from polyfed.flower.deploy.processes import LOOPBACK, Child, answers, be_private_and_stoppable, free_port, tail
from polyfed.flower.serve.control import Control
from polyfed.flower.serve.enrolment import Enrolment, Service
from polyfed.flower.serve.front import Front, FrontLog, nginx
from polyfed.flower.serve.registry import FILE, INVITED, NodeRegistry
from polyfed.runs.folder.audit_log import AuditLog
from polyfed.runs.folder.run_folder import RunFolder
from polyfed.runs.lifecycle import is_finished
from polyfed.settings import FACTS, Settings

log = logging.getLogger("polyfed")

START_LIMIT = 120.0
RESUMES = "Restarted with the same folder, the server resumes."
TICK = 0.5
HOUR = 3600.0
SEEN = "seen.json"
SERVER_APP = "polyfed.flower.serve.audited_app:app"
ANY_ADDRESS = "0.0.0.0"


class Failed(PolyfedError, RuntimeError):
    """The server or its run failed."""


@dataclass(frozen=True)
class Wanted:
    """Options of ``polyfed serve``."""

    settings: Settings
    recipe: str  # name of the settings
    host: str  # name or address under which nodes reach the server
    nodes: int  # number of nodes to wait for
    folder: Path
    port: int = 8443
    listen: str = ANY_ADDRESS
    newcomer: bool = False  # write a newcomer model, even if it needs layers that stay at the nodes
    config: Mapping[str, Any] = field(default_factory=dict)  # other keys of the run configuration

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise SettingError(f"--nodes must be at least 1, got {self.nodes}.")
        if not 1 <= self.port <= 65535:
            raise SettingError(f"--port must be from 1 to 65535, got {self.port}.")
        if not is_address(self.host) and not re.fullmatch(HOST_NAME, self.host):
            raise SettingError(
                f"--host must be a name or address without scheme and port, such as fl.example.org, got {self.host!r}."
            )
        if not is_address(self.listen):
            raise SettingError(f"--listen must be an IP address of this machine, got {self.listen!r}.")

    @property
    def identity(self) -> dict[str, Any]:
        """Return what must not change when a server resumes."""
        return {"recipe": self.recipe, "host": self.host, "port": self.port, "settings": settings_text(self.settings)}


def serve(wanted: Wanted, show: Callable[[str], None] = print) -> int:
    """Run a server until its run ends, and return the exit code."""
    nginx()
    be_private_and_stoppable("; restarted with the same folder, the server resumes")
    folder = ServerFolder(wanted.folder.resolve())
    prepare(folder, wanted)
    with folder.locked():
        if folder.run.exists() and RunFolder(folder.run).holds_run and is_finished(RunFolder(folder.run).read()[0]):
            show(f"The run has finished: {folder.run}")
            return 0
        server = RunningServer(folder, wanted, show)
        try:
            server.work()
        finally:
            server.close()
    return 0


def prepare(folder: ServerFolder, wanted: Wanted) -> None:
    """Create the folder, or check that an existing one is for the same run and version of polyfed."""
    if folder.described.exists():
        before = folder.description()
        if differing := sorted(_setting_names(before.get("settings")) ^ FACTS.keys()):
            raise SettingError(
                f"{folder.path} was created by another version of polyfed: its settings differ in {', '.join(differing)[:200]}. "
                "Finish the run with that version, or choose another --folder."
            )
        other = [name for name, value in wanted.identity.items() if before.get(name) != value]
        if other:
            raise SettingError(
                f"{folder.path} belongs to a server with a different {', '.join(other)}. Restart it with its original options, "
                "or choose another --folder."
            )
    else:
        if folder.path.exists() and any(folder.path.iterdir()):
            raise SettingError(f"{folder.path} is not empty and not a server folder. Choose another --folder.")
        folder.make()
    if not folder.app.exists():
        write_app(folder.app, wanted.settings, wanted.recipe, SERVER_APP)
    folder.describe(wanted.identity)


def _setting_names(text: object) -> set[str]:
    try:
        values = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        values = None
    return set(values) if isinstance(values, dict) else set()


def invite(folder: ServerFolder, registry: NodeRegistry, name: str) -> Path:
    """Write a kit, with which a node may enrol or enrol again."""
    described = folder.description()
    token = registry.invite(name)
    file = folder.kits / f"{name}{SUFFIX}"
    authority_text = (folder.certificates / CA_CERTIFICATE).read_text()
    Kit(name, described["host"], described["port"], token, authority_text).write(file)
    return file


class RunningServer:
    """The processes of a server."""

    def __init__(self, folder: ServerFolder, wanted: Wanted, show: Callable[[str], None]) -> None:
        self.folder, self.wanted, self.show = folder, wanted, show
        self.audit = AuditLog(folder.audit)
        self.authority = load_authority(folder.certificates, f"polyfed at {wanted.host}"[:64])
        renew_server_certificate(folder.certificates, self.authority, [wanted.host])
        create_loopback_certificates(folder.link_certificates, "polyfed SuperLink on loopback")
        link_authority, self.link_port = folder.link_certificates / CA_CERTIFICATE, free_port()
        self.service = Service(Enrolment(folder.path, self.authority, self.audit, self.enrolled), folder.front_secret)
        self.front = Front(
            folder.front,
            wanted.listen,
            wanted.port,
            self.link_port,
            self.service.start(),
            folder.front_secret,
            folder.certificates,
            link_authority,
        )
        self.front_log = FrontLog(folder.front / "access.log", self.audit)
        self.control = Control(self.link_port, link_authority, folder.control_secret)
        self.changing = threading.RLock()
        self.children: dict[str, Child] = {}
        self.registry_time = 0
        self.last_renewal = time.monotonic()
        self.connected: set[str] = set()

    def work(self) -> None:
        self.audit.write("server started", host=self.wanted.host, port=self.wanted.port)
        self.write_kits()
        self.start_link()
        self.update_nodes()
        self.start_front()
        self.wait_for_nodes()
        self.train()

    def write_kits(self) -> None:
        with NodeRegistry.changed(self.folder.path) as registry:
            for number in range(1, self.wanted.nodes + 1):
                name = f"node-{number}"
                if name not in registry.nodes:
                    invite(self.folder, registry, name)
            open_kits = [self.folder.kits / f"{name}{SUFFIX}" for name, node in registry.nodes.items() if node.state == INVITED]
        for file in open_kits:
            self.show(f"Kit: {_shown_path(file)}")
        if open_kits:
            self.show(
                "Send one kit to each node, as you would send a password. On the node, run: polyfed join KIT --data DIR --domain NAME"
            )

    def start_link(self) -> None:
        folder, link = self.folder, self.folder.link_certificates
        words = ["--host", LOOPBACK, "--port", str(self.link_port), "--database", str(folder.database)]
        words += ["--ssl-ca-certfile", str(link / CA_CERTIFICATE), "--ssl-certfile", str(link / SERVER_CERTIFICATE)]
        words += ["--ssl-keyfile", str(link / SERVER_KEY), "--enable-supernode-auth", "--isolation", "process"]
        words += ["--superexec-auth-secret-file", str(folder.runtime_secret), "--disable-runtime-dependency-installation"]
        command = [sys.executable, "-m", "polyfed.flower.serve.superlink", *words]
        self.children["superlink"] = folder.start("superlink", command)
        self.wait_until("superlink", self.control.is_ready)
        self.control.stop_others()
        words = ["--runtime-api-address", f"{LOOPBACK}:{self.link_port}", "--root-certificates", str(link / CA_CERTIFICATE)]
        words += ["--superexec-auth-secret-file", str(folder.runtime_secret)]
        self.children["superexec"] = folder.start("superexec", ["flower-superexec", *words])

    def start_front(self) -> None:
        self.front.check()
        host = LOOPBACK if self.wanted.listen in (ANY_ADDRESS, "::") else self.wanted.listen
        if answers(host, self.wanted.port):
            raise SettingError(f"Port {self.wanted.port} is already in use. Choose another --port.")
        self.children["front"] = self.folder.start("front", self.front.command(), signal.SIGTERM)
        self.wait_until("front", lambda: answers(host, self.wanted.port))

    def wait_until(self, name: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + START_LIMIT
        while not ready():
            self.require_alive()
            if time.monotonic() > end:
                raise Failed(f"{name} did not start within {START_LIMIT:g} s. See {self.children[name].log}.")
            time.sleep(0.1)

    def require_alive(self) -> None:
        """Raise an error if one of the processes has ended."""
        for name, child in self.children.items():
            if not child.alive:
                problem = f"{name} exited with {child.handle.returncode}: {tail(child.output(), 3)} (see {child.log})."
                raise Failed(f"{problem} {RESUMES}")

    def enrolled(self) -> None:
        """Admit a new node, and give nginx time to reload."""
        self.update_nodes()
        time.sleep(0.5)

    def update_nodes(self) -> None:
        """Make the reverse proxy and the SuperLink accept exactly the enrolled nodes."""
        with self.changing:
            self.registry_time = (self.folder.path / FILE).stat().st_mtime_ns
            registry = NodeRegistry.read(self.folder.path)
            if self.front.write(registry.nodes.values()) and "front" in self.children:
                self.reload_front()
            keys, known = registry.keys(), self.control.nodes()
            for key, (number, _) in known.items():
                if key not in keys:
                    self.control.unregister(number)
                    self.audit.write("node removed", number=str(number))
            for key in keys.keys() - known.keys():
                self.control.register(key, keys[key])
            numbers = {str(number): keys[key] for key, (number, _) in self.control.nodes().items() if key in keys}
            write_private(self.folder.node_numbers, json.dumps(numbers))

    def poll(self) -> None:
        """Check processes, registry, reverse proxy log and server certificate."""
        self.require_alive()
        if (self.folder.path / FILE).stat().st_mtime_ns != self.registry_time:
            self.update_nodes()
        self.record_seen(self.front_log.poll())
        if time.monotonic() - self.last_renewal > HOUR:
            self.last_renewal = time.monotonic()
            if renew_server_certificate(self.folder.certificates, self.authority, [self.wanted.host]):
                self.reload_front()

    def reload_front(self) -> None:
        """Reload nginx's configuration; open connections end after their current request."""
        os.kill(self.children["front"].handle.pid, signal.SIGHUP)

    def record_seen(self, seen: Mapping[str, Mapping[str, Any]]) -> None:
        """Record when nodes were last seen, and drop an old certificate once its successor is used."""
        if not seen:
            return
        file = self.folder.path / SEEN
        before = json.loads(file.read_text()) if file.exists() else {}
        write_private(file, json.dumps(before | {name: line["time"] for name, line in seen.items()}))
        nodes = NodeRegistry.read(self.folder.path).nodes
        if any(nodes[name].before and nodes[name].serial == line["serial"] for name, line in seen.items() if name in nodes):
            with NodeRegistry.changed(self.folder.path) as registry:
                for name, line in seen.items():
                    if registry.nodes[name].serial == line["serial"]:
                        registry.nodes[name].before = ""

    def watch(self) -> None:
        """Poll, and report nodes that connected or disconnected."""
        self.poll()
        keys = NodeRegistry.read(self.folder.path).keys()
        now = {keys[key] for key, (_, connected) in self.control.nodes().items() if connected and key in keys}
        for name in sorted(now - self.connected):
            self.audit.write("node connected", node=name)
            self.show(f"{name} is connected ({len(now)} of {self.wanted.nodes}).")
        for name in sorted(self.connected - now):
            self.audit.write("node gone", node=name)
            self.show(f"{name} disconnected ({len(now)} of {self.wanted.nodes}).")
        self.connected = now
        time.sleep(TICK)

    def wait_for_nodes(self) -> None:
        self.show(f"Listening on {self.wanted.host}:{self.wanted.port}. Waiting for {self.wanted.nodes} nodes.")
        while len(self.connected) < self.wanted.nodes:
            self.watch()

    def train(self) -> None:
        config = {MIN_NODES: self.wanted.nodes, NEWCOMER: self.wanted.newcomer, **self.wanted.config}
        run = self.control.start(self.folder.app, config)
        self.audit.write("run started", run=str(run))
        threading.Thread(target=self.show_log, args=(run,), daemon=True).start()
        while (ended := self.control.ended(run)) is None:
            self.watch()
        self.poll()
        completed, how = ended
        self.audit.write("run ended", run=str(run), how=how)
        # The last lines of the log arrive after the status.
        time.sleep(2 * TICK)
        if not completed:
            raise Failed(f"The run failed ({how}). See its log above. {RESUMES}")
        self.show(f"Finished. Run folder: {_shown_path(self.folder.run)}")

    def show_log(self, run: int) -> None:
        """Show polyfed's lines of the run's log."""
        try:
            for text in self.control.log_of(run):
                for line in text.splitlines():
                    if "polyfed: " in line:
                        self.show(line.partition("polyfed: ")[2])
        except httpx.HTTPError as error:
            log.warning("The connection to the run's log was lost (%s).", error)

    def close(self) -> None:
        for child in reversed(self.children.values()):
            child.stop()
        self.front_log.poll()
        self.audit.write("server stopped")
        self.service.shutdown()


def _shown_path(path: Path) -> str:
    """Shorten a path in the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
