"""A server and nodes as their users start them, ``polyfed serve`` and ``polyfed join``, each in a namespace or all on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.flower_harness import PROGRAMS, HarnessError, Process, end, logged_process
from helpers.namespaces import Machine
from polyfed.runs.folder.audit_log import lines_of, verify

TESTS = Path(__file__).parents[1]
LONG = 1800.0
"""Seconds: ends what hangs; a busy machine is ten times slower than a quiet one."""
DATA = "digits-mini(per_domain=16)"
DOMAINS = ("pen", "photo", "street")
RECIPE = """\
title = "A small run for tests"
[settings]
data = "digits-mini(per_domain=16)"
unseen = ["post", "print"]
rounds = 2
batch_size = 8
local_steps = 2
checkpoint_every = "1"
method = "METHOD"
"""


def variables() -> dict[str, str]:
    path = f"{PROGRAMS}{os.pathsep}/usr/sbin{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}


@dataclass
class Deployed:
    """The processes of one deployment; leaving the ``with`` block ends them."""

    folder: Path
    machines: Mapping[str, Machine]
    port: int = 8443
    processes: list[Process] = field(default_factory=list)

    def __enter__(self) -> Deployed:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.handle.terminate()
        for process in self.processes:
            try:
                process.handle.wait(30)
            except subprocess.TimeoutExpired:
                end(process)

    @property
    def server_folder(self) -> Path:
        return self.folder / "polyfed-server"

    @property
    def host(self) -> str:
        return self.machines["server"].address

    def start(
        self, name: str, machine: str, words: Sequence[str], program: Sequence[str] = (str(PROGRAMS / "polyfed"),)
    ) -> Process:
        """Start ``polyfed``, or another program that takes its words, on a machine."""
        command = self.machines[machine].command([*program, *words])
        process = logged_process(name, command, self.folder / f"{name}.log", variables(), self.folder)
        self.processes.append(process)
        return process

    def serve(self, method: str, nodes: int, *words: str, program: Sequence[str] = (str(PROGRAMS / "polyfed"),)) -> Process:
        (self.folder / "small.toml").write_text(RECIPE.replace("METHOD", method))
        options = ["--host", self.host, "--nodes", str(nodes), "--port", str(self.port), *words]
        server = self.start("serve", "server", ["serve", "small.toml", *options], program)
        server.wait_for("Waiting for", LONG)
        return server

    def kit(self, node: str) -> Path:
        return self.server_folder / "kits" / f"{node}.kit"

    def join(self, node: str, machine: str, domain: str, *words: str, wait: bool = True) -> Process:
        command = ["join", str(self.kit(node)), "--data", DATA, "--domain", domain, *words]
        process = self.start(node, machine, command)
        if wait:
            process.wait_for("Connected to", LONG)
        return process

    def run_on(self, machine: str, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        command = self.machines[machine].command(words)
        return subprocess.run(
            command, env=variables(), cwd=self.folder, capture_output=True, text=True, timeout=LONG, check=False, **options
        )

    def python_on(self, machine: str, code: str, *words: str) -> str:
        """What a small program prints on a machine."""
        done = self.run_on(machine, [sys.executable, "-c", code, *words])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def polyfed(self, *words: str) -> str:
        done = self.run_on("server", [str(PROGRAMS / "polyfed"), *words])
        assert done.returncode == 0, done.stderr
        return done.stdout

    def audited(
        self, path: Path, wanted: Mapping[str, Any] | Callable[[dict[str, Any]], bool], limit: float = 300.0
    ) -> dict[str, Any]:
        """Wait for a line of an audit log, whose chain must be whole."""
        fits = wanted if callable(wanted) else lambda line: all(line.get(name) == value for name, value in wanted.items())
        end_time = time.monotonic() + limit
        while time.monotonic() < end_time:
            found = next((line for line in (lines_of(path) if path.exists() else ()) if fits(line)), None)
            if found is not None:
                verify(path)
                return found
            time.sleep(0.2)
        raise HarnessError(f"{path} has no such line:\n" + "\n".join(map(json.dumps, lines_of(path))))


def on_loopback(names: Iterable[str]) -> dict[str, Machine]:
    """All machines are this one."""

    class Here(Machine):
        def command(self, words: Sequence[str]) -> list[str]:
            return list(words)

    return {name: Here("", "127.0.0.1") for name in names}
