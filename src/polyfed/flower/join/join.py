"""``polyfed join``: create keys, enrol, and run a node until it is stopped, restarting its processes when they end."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import tomli_w

from polyfed.errors import SettingError
from polyfed.flower.deploy.certificates import CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY, create_loopback_certificates
from polyfed.flower.deploy.folders import Membership, NodeFolder
from polyfed.flower.deploy.kit import Kit
from polyfed.flower.deploy.private_files import write_private
from polyfed.flower.deploy.processes import LOOPBACK, Child, be_private_and_stoppable, free_port, tail
from polyfed.flower.join.enrol import Unreachable, check_access, clock_problem, enrol, node_context, renew_certificate
from polyfed.flower.join.forwarder import Forwarder, server_context
from polyfed.flower.join.policy import Policy

TICK = 0.5
SHORTEST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
CHECK_SECONDS = 30.0  # seconds between checks that the server still admits this node
DAY = 86400.0
CONNECTED = "SuperNode ID:"
KILLED_BEFORE = "Failed to activate SuperNode"
T = TypeVar("T")


def _until_reached(send: Callable[[], T], show: Callable[[str], None]) -> T:
    """Send a request, and retry with increasing pauses while the server cannot be reached."""
    pause = SHORTEST_PAUSE
    while True:
        try:
            return send()
        except Unreachable as error:
            show(f"{error} Retrying in {pause:g} s.")
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)


@dataclass
class JoinedNode:
    """The processes of a node."""

    folder: NodeFolder
    member: Membership
    show: Callable[[str], None]
    supernode: Child | None = None
    executor: Child | None = None
    address: str = ""
    connected: bool = False
    last_check: float = field(default_factory=time.monotonic)

    def work(self) -> None:
        """Run until the process is stopped or the server rejects the node."""
        port = self.forwarder().start()
        while True:
            self.check()
            self.start(port)
            self.watch()
            self.stop()
            self.show(f"The node restarts in {SHORTEST_PAUSE:g} s.")
            time.sleep(SHORTEST_PAUSE)

    def forwarder(self) -> Forwarder:
        certificates = self.folder.local_certificates
        create_loopback_certificates(certificates, "polyfed node on loopback")
        return Forwarder(
            server_context(certificates / SERVER_CERTIFICATE, certificates / SERVER_KEY),
            lambda: node_context(self.folder),
            self.member.host,
            self.member.port,
            lambda account: self.folder.note("another account refused at the forwarder", account=account),
        )

    def check(self) -> None:
        """Wait until the server admits this node; compare clocks, renew the certificate and remove old state."""
        reply = _until_reached(lambda: check_access(self.folder, self.member), self.show)
        if problem := clock_problem(reply.ahead):
            self.show(problem)
            self.folder.note("clock is off", seconds=round(reply.ahead, 1))
        self.renew()
        remove_old_state(self.folder, Policy.read(self.folder.policy).keep_days)
        self.last_check = time.monotonic()

    def renew(self) -> None:
        """Renew the certificate if it expires soon; if the server is unreachable, the next check tries again."""
        try:
            if renew_certificate(self.folder, self.member):
                self.show("The certificate was renewed.")
                self.folder.note("certificate renewed")
        except Unreachable as error:
            self.show(f"{error} The certificate will be renewed later.")

    def start(self, port: int) -> None:
        self.address, self.connected = f"{LOOPBACK}:{free_port()}", False
        host, own_port = self.address.split(":")
        words = ["--superlink", f"{LOOPBACK}:{port}", "--root-certificates", str(self.folder.local_certificates / CA_CERTIFICATE)]
        words += ["--auth-supernode-private-key", str(self.folder.flower_key), "--host", host, "--port", own_port]
        words += ["--isolation", "process", "--superexec-auth-secret-file", str(self.folder.runtime_secret)]
        words += ["--node-config", str(self.folder.config)]
        self.supernode = self.folder.start("supernode", [sys.executable, "-m", "polyfed.flower.join.guarded_supernode", *words])
        self.executor = self.start_executor()

    def start_executor(self) -> Child:
        return self.folder.start("executor", [sys.executable, "-m", "polyfed.flower.join.guarded_executor", self.address])

    def watch(self) -> None:
        assert self.supernode is not None and self.executor is not None
        while self.supernode.alive:
            if not self.connected and CONNECTED in self.supernode.output():
                self.connected = True
                self.folder.note("connected", host=self.member.host, port=self.member.port)
                self.show(f"Connected to {self.member.host}:{self.member.port} as {self.member.name}.")
            if not self.executor.alive:
                self.show(f"The executor ended: {tail(self.executor.output(), 2)}")
                self.executor = self.start_executor()
                time.sleep(SHORTEST_PAUSE)
            if time.monotonic() - self.last_check > CHECK_SECONDS:
                self.check()
            time.sleep(TICK)
        output = self.supernode.output()
        self.folder.note("disconnected")
        if KILLED_BEFORE in output:
            self.show("The server still waits for this node's previous connection, which was lost. This takes up to a minute.")
        else:
            self.show(f"The connection ended: {tail(output, 2)}")

    def stop(self) -> None:
        for child in (self.supernode, self.executor):
            if child is not None:
                child.stop()


def join(kit: Path | None, folder: Path, given: Policy, show: Callable[[str], None] = print) -> None:
    """Run a node until it is stopped; only the first start needs a kit, and writes ``given`` to ``node.toml``."""
    be_private_and_stoppable()
    place = NodeFolder(folder.resolve())
    found = None if kit is None else Kit.read(kit)
    if found is None and place.membership() is None:
        raise SettingError(f"{folder} is not a node folder. Pass the kit: polyfed join KIT --data DIR --domain NAME")
    place.make()
    with place.locked():
        policy = load_policy(place, given)
        write_config(place, policy)
        if found is not None:
            _until_reached(lambda: enrol(place, found, policy.client or policy.domain), show)
        member = place.membership()
        assert member is not None
        node = JoinedNode(place, member, show)
        try:
            node.work()
        finally:
            node.stop()


def load_policy(folder: NodeFolder, given: Policy) -> Policy:
    """Load the node's policy; the first start writes it, and later ones must agree with it."""
    if not folder.policy.exists():
        if not given.data:
            raise SettingError("Specify the data of this node with --data DIR.")
        given.write(folder.policy)
        return given
    policy = Policy.read(folder.policy)
    for name in ("data", "domain", "client"):
        wanted, current = getattr(given, name), getattr(policy, name)
        if wanted and wanted != current:
            raise SettingError(
                f"{folder.policy} has {name} = {current!r}, but --{name} is {wanted!r}. Edit the file or remove the option."
            )
    return policy


def write_config(folder: NodeFolder, policy: Policy) -> None:
    values = {"data": policy.data, "domain": policy.domain, "client": policy.client, "state": str(folder.state)}
    write_private(folder.config, tomli_w.dumps({name: value for name, value in values.items() if value}))


def remove_old_state(folder: NodeFolder, days: int) -> None:
    """Remove the local state of runs that have been unused for this number of days."""
    end = time.time() - days * DAY
    for run in folder.state.iterdir():
        times = [path.stat().st_mtime for path in [run, *run.rglob("*")]]
        if run.is_dir() and run.name != "resident" and max(times) < end:
            shutil.rmtree(run)
            folder.note("state removed", run=run.name, unused_days=days)
