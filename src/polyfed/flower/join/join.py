"""``polyfed join``: a node in one command. It makes its keys, enrols, and works for the server until it is stopped.

The SuperNode, the executor and the forwarder are started again when they end, and the node connects again by itself.
"""

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
from polyfed.flower.deploy.certificates import CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY, keep_loopback_server
from polyfed.flower.deploy.folders import Membership, NodeFolder
from polyfed.flower.deploy.kit import Kit
from polyfed.flower.deploy.private_files import write_private
from polyfed.flower.deploy.processes import LOOPBACK, Child, be_private_and_stoppable, free_port, tail
from polyfed.flower.join.enrol import Unreachable, clock_problem, enrol, hello, own_context, renewed
from polyfed.flower.join.forwarder import Forwarder, server_context
from polyfed.flower.join.policy import Policy

TICK = 0.5
SHORTEST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
LOOK_AFTER = 30.0
"""Seconds between two looks whether the server still lets this node in."""
DAY = 86400.0
CONNECTED = "SuperNode ID:"
KILLED_BEFORE = "Failed to activate SuperNode"
T = TypeVar("T")


def _until_reached(ask: Callable[[], T], show: Callable[[str], None]) -> T:
    """The server's answer; one that cannot be reached is asked again, after longer and longer pauses."""
    pause = SHORTEST_PAUSE
    while True:
        try:
            return ask()
        except Unreachable as error:
            show(f"{error} Trying again in {pause:g} s.")
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)


@dataclass
class JoinedNode:
    """The processes of one node."""

    folder: NodeFolder
    member: Membership
    show: Callable[[str], None]
    supernode: Child | None = None
    executor: Child | None = None
    address: str = ""
    connected: bool = False
    last_look: float = field(default_factory=time.monotonic)

    def work(self) -> None:
        """Work until the process is stopped, or the server refuses the node."""
        port = self.forwarder().start()
        while True:
            self.look_after()
            self.start(port)
            self.watch()
            self.stop()
            self.show(f"The node starts again in {SHORTEST_PAUSE:g} s.")
            time.sleep(SHORTEST_PAUSE)

    def forwarder(self) -> Forwarder:
        certificates = self.folder.local_certificates
        keep_loopback_server(certificates, "polyfed node on loopback")
        return Forwarder(
            server_context(certificates / SERVER_CERTIFICATE, certificates / SERVER_KEY),
            lambda: own_context(self.folder),
            self.member.host,
            self.member.port,
            lambda account: self.folder.note("another account refused at the forwarder", account=account),
        )

    def look_after(self) -> None:
        """Wait until the server lets this node in; renew its certificate, compare clocks, remove old state."""
        answer = _until_reached(lambda: hello(self.folder, self.member), self.show)
        if problem := clock_problem(answer.ahead):
            self.show(problem)
            self.folder.note("clock is off", seconds=round(answer.ahead, 1))
        self.renew()
        remove_old_state(self.folder, Policy.read(self.folder.policy).keep_days)
        self.last_look = time.monotonic()

    def renew(self) -> None:
        """Renew the certificate where it ends soon; a server that is busy now is asked again with the next look."""
        try:
            if renewed(self.folder, self.member):
                self.show("The certificate was renewed.")
                self.folder.note("certificate renewed")
        except Unreachable as error:
            self.show(f"{error} The certificate is renewed later.")

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
            if not self.connected and CONNECTED in self.supernode.said():
                self.connected = True
                self.folder.note("connected", host=self.member.host, port=self.member.port)
                self.show(f"Connected to {self.member.host}:{self.member.port} as {self.member.name}.")
            if not self.executor.alive:
                self.show(f"The executor ended: {tail(self.executor.said(), 2)}")
                self.executor = self.start_executor()
                time.sleep(SHORTEST_PAUSE)
            if time.monotonic() - self.last_look > LOOK_AFTER:
                self.look_after()
            time.sleep(TICK)
        said = self.supernode.said()
        self.folder.note("disconnected")
        if KILLED_BEFORE in said:
            self.show("The server still waits for this node's last connection, which was cut off; that takes up to a minute.")
        else:
            self.show(f"The connection ended: {tail(said, 2)}")

    def stop(self) -> None:
        for child in (self.supernode, self.executor):
            if child is not None:
                child.stop()


def join(kit: Path | None, folder: Path, given: Policy, show: Callable[[str], None] = print) -> None:
    """Join the server that wrote the kit, or, without a kit, go on as a node that has joined.

    What the command line says of data and limits (``given``) is written to ``node.toml`` with the first start.
    """
    be_private_and_stoppable()
    place = NodeFolder(folder.resolve())
    found = None if kit is None else Kit.read(kit)
    if found is None and place.membership() is None:
        raise SettingError(
            f"{folder} is no folder of a node that has joined. Name its kit: polyfed join KIT --data DIR --domain NAME"
        )
    place.make()
    with place.locked():
        policy = kept_policy(place, given)
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


def kept_policy(folder: NodeFolder, given: Policy) -> Policy:
    """The node's policy; the first start writes it, later ones must not contradict it."""
    if not folder.policy.exists():
        if not given.data:
            raise SettingError("Say where the data of this node are: --data DIR")
        given.write(folder.policy)
        return given
    policy = Policy.read(folder.policy)
    for name in ("data", "domain", "client"):
        wanted, current = getattr(given, name), getattr(policy, name)
        if wanted and wanted != current:
            raise SettingError(
                f"{folder.policy} says {name} = {current!r}, the command line {wanted!r}. Edit that file, or leave out --{name}."
            )
    return policy


def write_config(folder: NodeFolder, policy: Policy) -> None:
    values = {"data": policy.data, "domain": policy.domain, "client": policy.client, "state": str(folder.state)}
    write_private(folder.config, tomli_w.dumps({name: value for name, value in values.items() if value}))


def remove_old_state(folder: NodeFolder, days: int) -> None:
    """Remove what runs left here that nobody has asked about for some days."""
    end = time.time() - days * DAY
    for run in folder.state.iterdir():
        times = [path.stat().st_mtime for path in [run, *run.rglob("*")]]
        if run.is_dir() and run.name != "resident" and max(times) < end:
            shutil.rmtree(run)
            folder.note("state removed", run=run.name, unused_days=days)
