"""Network namespaces joined by a switch, so that tests have machines of their own: 10.77.0.1 is the server, others are named."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "10.77.0"


@dataclass(frozen=True)
class Machine:
    """One namespace with an address."""

    namespace: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """A command as it is started on this machine."""
        return ["ip", "netns", "exec", self.namespace, *words]


def usable() -> bool:
    """Whether this account may make namespaces."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"pf-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


@contextmanager
def machines(names: Sequence[str]) -> Iterator[dict[str, Machine]]:
    """Machines that reach one another, and nothing else."""
    mark = uuid.uuid4().hex[:5]
    switch = f"pf{mark}-switch"
    found = {name: Machine(f"pf{mark}-{name}", f"{NETWORK}.{number}") for number, name in enumerate(names, 1)}
    everything = [switch, *(machine.namespace for machine in found.values())]
    try:
        for namespace in everything:
            ip("netns", "add", namespace)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, machine in enumerate(found.values()):
            port = f"port{number}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", machine.namespace, "link", "set", "lo", "up")
            ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            ip("-n", machine.namespace, "link", "set", "eth0", "up")
        yield found
    finally:
        for namespace in everything:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
