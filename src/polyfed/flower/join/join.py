"""``polyfed join``: a node in one command. It makes its keys, enrols, and works for the server until it is stopped.

The SuperNode, the executor and the forwarder are started again when they end, and the node connects again by itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from polyfed.errors import SettingError
from polyfed.flower.deploy.certificates import (
    CA_CERTIFICATE,
    LOOPBACK_DAYS,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    kept_authority,
    kept_server,
)
from polyfed.flower.deploy.kit import Kit
from polyfed.flower.deploy.private_files import OTHERS, write_private
from polyfed.flower.deploy.processes import LOOPBACK, Child, free_port, start, tail
from polyfed.flower.join.enrol import Unreachable, clock_problem, enrol, hello, own_context, renewed
from polyfed.flower.join.folder import FOLDER_VARIABLE, Membership, NodeFolder
from polyfed.flower.join.forwarder import Forwarder, server_context
from polyfed.flower.join.policy import Policy
from polyfed.runs.folder.audit_log import AuditLog

log = logging.getLogger("polyfed")

TICK = 0.5
SHORTEST_PAUSE, LONGEST_PAUSE = 2.0, 30.0
LOOK_AFTER = 30.0
"""Seconds between two looks whether the server still lets this node in."""
DAY = 86400.0
CONNECTED = "SuperNode ID:"
KILLED_BEFORE = "Failed to activate SuperNode"


@dataclass
class Node:
    """One node at work."""

    folder: NodeFolder
    member: Membership
    show: Callable[[str], None]
    supernode: Child | None = None
    executor: Child | None = None
    address: str = ""
    connected: bool = False
    pause: float = SHORTEST_PAUSE
    last_look: float = field(default_factory=time.monotonic)

    def work(self) -> None:
        """Work until the process is stopped, or the server refuses the node."""
        port = self.forwarder().start()
        while True:
            self.look_after()
            self.start(port)
            self.watch()
            self.stop()
            self.show(f"The node starts again in {self.pause:g} s.")
            time.sleep(self.pause)
            self.pause = min(LONGEST_PAUSE, 2 * self.pause)

    def forwarder(self) -> Forwarder:
        """The forwarder between the SuperNode and the server."""
        certificates = self.folder.local_certificates
        kept_server(certificates, kept_authority(certificates, "polyfed node on loopback"), [], LOOPBACK_DAYS)
        audit = AuditLog(self.folder.audit)
        return Forwarder(
            server_context(certificates / SERVER_CERTIFICATE, certificates / SERVER_KEY),
            lambda: own_context(self.folder),
            self.member.host,
            self.member.port,
            lambda account: audit.write("another account refused at the forwarder", account=account),
        )

    def look_after(self) -> None:
        """Wait until the server lets this node in; renew its certificate, compare clocks, remove old state."""
        while True:
            try:
                answer = hello(self.folder, self.member)
                break
            except Unreachable as error:
                self.show(f"{error} Trying again in {self.pause:g} s.")
                time.sleep(self.pause)
                self.pause = min(LONGEST_PAUSE, 2 * self.pause)
        self.pause = SHORTEST_PAUSE
        if problem := clock_problem(answer.ahead):
            self.show(problem)
            AuditLog(self.folder.audit).write("clock is off", seconds=round(answer.ahead, 1))
        self.renew()
        remove_old_state(self.folder, Policy.read(self.folder.policy).keep_days)
        self.last_look = time.monotonic()

    def renew(self) -> None:
        """Renew the certificate where it ends soon; a server that is busy now is asked again with the next look."""
        try:
            if renewed(self.folder, self.member):
                self.show("The certificate was renewed.")
                AuditLog(self.folder.audit).write("certificate renewed")
        except Unreachable as error:
            self.show(f"{error} The certificate is renewed later.")

    def start(self, port: int) -> None:
        """Start the SuperNode and its executor."""
        self.address, self.connected = f"{LOOPBACK}:{free_port()}", False
        host, own_port = self.address.split(":")
        words = ["--superlink", f"{LOOPBACK}:{port}", "--root-certificates", str(self.folder.local_certificates / CA_CERTIFICATE)]
        words += ["--auth-supernode-private-key", str(self.folder.flower_key), "--host", host, "--port", own_port]
        words += ["--isolation", "process", "--superexec-auth-secret-file", str(self.folder.runtime_secret)]
        words += ["--node-config", str(self.folder.config)]
        self.supernode = self.child("supernode", [sys.executable, "-m", "polyfed.flower.join.supernode", *words])
        self.executor = self.child("executor", [sys.executable, "-m", "polyfed.flower.join.executor", self.address])

    def child(self, name: str, command: list[str]) -> Child:
        """Start one of the processes."""
        variables = {"FLWR_HOME": str(self.folder.flower_home), FOLDER_VARIABLE: str(self.folder.path)}
        return start(name, command, self.folder.logs, variables)

    def watch(self) -> None:
        """Return when the SuperNode has ended."""
        assert self.supernode is not None and self.executor is not None
        while self.supernode.alive:
            if not self.connected and CONNECTED in self.supernode.said():
                self.connected, self.pause = True, SHORTEST_PAUSE
                AuditLog(self.folder.audit).write("connected", host=self.member.host, port=self.member.port)
                self.show(f"Connected to {self.member.host}:{self.member.port} as {self.member.name}.")
            if not self.executor.alive:
                self.show(f"The executor ended: {tail(self.executor.said(), 2)}")
                self.executor = self.child("executor", [sys.executable, "-m", "polyfed.flower.join.executor", self.address])
                time.sleep(SHORTEST_PAUSE)
            if time.monotonic() - self.last_look > LOOK_AFTER:
                self.look_after()
            time.sleep(TICK)
        said = self.supernode.said()
        AuditLog(self.folder.audit).write("disconnected")
        if KILLED_BEFORE in said:
            self.show("The server still waits for this node's last connection, which was cut off; that takes up to a minute.")
        else:
            self.show(f"The connection ended: {tail(said, 2)}")

    def stop(self) -> None:
        """End the processes; the SuperNode says goodbye."""
        for child in (self.supernode, self.executor):
            if child is not None:
                child.stop()


def join(kit: Path | None, folder: Path, given: Policy, show: Callable[[str], None] = print) -> None:
    """Join a server, for the first time or again.

    Args:
        kit: the file that the server wrote; None: go on as a node that has joined.
        folder: of the node.
        given: what the command line says of data and limits; written to ``node.toml`` with the first start.
        show: prints a line.
    """
    os.umask(OTHERS)
    signal.signal(signal.SIGTERM, _interrupted)
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
        member = enrolled(place, found, policy.client or policy.domain, show) if found is not None else place.membership()
        assert member is not None
        node = Node(place, member, show)
        try:
            node.work()
        finally:
            node.stop()


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt(f"stopped by signal {number}.")


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


def enrolled(folder: NodeFolder, kit: Kit, client: str, show: Callable[[str], None]) -> Membership:
    """Enrol, and wait for a server that is not there yet."""
    pause = SHORTEST_PAUSE
    before = folder.certificate.read_bytes() if folder.certificate.exists() else b""
    while True:
        try:
            member = enrol(folder, kit, client)
            if folder.certificate.read_bytes() != before:
                AuditLog(folder.audit).write("enrolled", host=kit.host, port=kit.port, name=kit.name)
            return member
        except Unreachable as error:
            show(f"{error} Trying again in {pause:g} s.")
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)


def write_config(folder: NodeFolder, policy: Policy) -> None:
    """What the SuperNode gives to ClientApps."""
    values = {"data": policy.data, "domain": policy.domain, "client": policy.client, "state": str(folder.state)}
    write_private(folder.config, tomli_w.dumps({name: value for name, value in values.items() if value}))


def remove_old_state(folder: NodeFolder, days: int) -> None:
    """Remove what runs left here that nobody has asked about for some days."""
    end = time.time() - days * DAY
    for run in folder.state.iterdir():
        times = [path.stat().st_mtime for path in [run, *run.rglob("*")]]
        if run.is_dir() and run.name != "resident" and max(times) < end:
            shutil.rmtree(run)
            AuditLog(folder.audit).write("state removed", run=run.name, unused_days=days)
