"""A real SuperLink and real SuperNodes on loopback for tests: TLS, node keys, runs submitted with ``flwr run``.

    with Trial(tmp_path, ['data="/srv/images" domain="pen"', ...]) as trial:
        ended = trial.run(app_folder)                   # or: run = trial.submit(app_folder); run.wait_for("round 1", 60); ...
        assert ended.status == "finished:completed", ended.log

Logs are in ``folder/logs``, one file for each process. Every process has a folder of Flower's own (FLWR_HOME) to itself, as if it ran on
its own machine; they share the Python environment of the tests and install nothing, so no network is needed.

A SuperNode that is started again after SIGTERM is let in at once. After SIGKILL it takes 59 s: the SuperLink takes the key for online until
two heartbeats of 30 s are missed, and refuses it; the node then exits, so something must start it again.

Where the time goes, and what helps

* ``Grid.send_and_receive`` sleeps 3 s between looks: push and pull by oneself, every 0.05 to 0.1 s.
* The SuperExec of a SuperLink or SuperNode looks for work every second: FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05 (0.01 is the least).
* Each message starts ``flwr-clientapp``, a fresh Python that imports everything anew. ``--isolation process`` starts none;
  a program of one's own may then ask the node's Runtime API for tasks (AcquireTask) and fork for each, with everything imported: the
  ``executor`` of a Trial. The call is ``flwr.supernode.runtime.run_clientapp.run_clientapp(address, token, insecure)``.
* A SuperNode that found no message sleeps 3 s, and it looks right after it has replied, always just too early: 3 s for each exchange.
  Flower has no setting for it. It looks for its ClientApp's reply every 0.5 s.
* Fewer exchanges: ask one question instead of two.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from helpers.trial_certificates import make_certificates, node_name
from polyfed.flower.deploy.certificates import CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY
from polyfed.flower.deploy.processes import free_port

PROGRAMS = Path(sys.executable).parent
HOST = "127.0.0.1"
LINK = "trial"
MARK = "POLYFED_TEST_FEDERATION"
START_LIMIT, STOP_LIMIT, COMMAND_LIMIT, RETURN_LIMIT, RUN_LIMIT = 300.0, 120.0, 300.0, 300.0, 1200.0
"""Seconds: they end what hangs; a busy machine is ten times slower than a quiet one."""
QUICK = {
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "OMP_NUM_THREADS": "1",
}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class HarnessError(AssertionError):
    """A process that did not do in time what it was started for; shows the end of its log."""


@dataclass
class Ended:
    """A run that came to its end."""

    number: str
    status: str
    details: str
    seconds: float
    log: str


@dataclass
class Process:
    """A process with a log file of its own, in a process group of its own."""

    name: str
    handle: subprocess.Popen[bytes]
    log_file: Path
    log_start: int = 0

    @property
    def log(self) -> str:
        """What this process has said; a log file goes on over restarts."""
        return COLOURS.sub("", self.log_file.read_bytes()[self.log_start :].decode(errors="replace"))

    @property
    def alive(self) -> bool:
        return self.handle.poll() is None

    def wait_for(self, text: str, limit: float) -> None:
        """Wait until the log says something."""
        end = time.monotonic() + limit
        while text not in self.log:
            if not self.alive:
                raise HarnessError(f"{self.name} ended with {self.handle.returncode} before it said {text!r}:\n{self.log[-3000:]}")
            if time.monotonic() > end:
                raise HarnessError(f"{self.name} did not say {text!r} within {limit:g} s:\n{self.log[-3000:]}")
            time.sleep(0.05)

    def wait(self, limit: float) -> int:
        """Wait until the process has ended by itself."""
        try:
            return self.handle.wait(limit)
        except subprocess.TimeoutExpired as error:
            raise HarnessError(f"{self.name} still ran after {limit:g} s:\n{self.log[-3000:]}") from error


def executor_name(node: str) -> str:
    return f"{node}-executor"


def logged_process(name: str, command: Sequence[str], log_file: Path, environment: Mapping[str, str], folder: Path) -> Process:
    """Start a process in a folder; what it says goes to the end of a log file."""
    with log_file.open("ab") as log:
        log_start = log.tell()
        handle = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    return Process(name, handle, log_file, log_start)


def end(process: Process) -> None:
    """Kill a process and its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.handle.pid, signal.SIGKILL)
    process.handle.wait()


@dataclass
class Trial:
    """One SuperLink and its SuperNodes; leaving the ``with`` block ends every process, whatever happened inside.

    Args:
        folder: certificates, logs, Flower's own folders and everything else go here.
        node_configs: what ``--node-config`` says for each node, such as ``data="/srv/images" domain="sketch"``.
        environment: added to the environment of every process.
        executor: a command that runs ClientApps for a node instead of Flower's own; it is started beside each node, with the address of
            the node's Runtime API as its last word, and the node with ``--isolation process``.
        supernode: the program of a node.
    """

    folder: Path
    node_configs: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    executor: Sequence[str] = ()
    supernode: Sequence[str] = ("flower-supernode",)
    processes: dict[str, Process] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    port: int = field(default_factory=free_port)

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def __enter__(self) -> Trial:
        try:
            make_certificates(self.certificates, nodes=len(self.node_configs))
            self.start_link()
            self.register(*range(1, len(self.node_configs) + 1))
            for number in range(1, len(self.node_configs) + 1):
                self.start_node(number, wait=False)
            for number in range(1, len(self.node_configs) + 1):
                self.node(number).wait_for("SuperNode ID:", START_LIMIT)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------ processes
    def start_link(self) -> Process:
        """Start the SuperLink and wait until it answers."""
        home = self.home("link")
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "{self.address}"\n'
            f'root-certificates = "{self.certificates / CA_CERTIFICATE}"\n'
        )
        started = self.start(
            "link",
            ["flower-superlink", "--host", HOST, "--port", str(self.port)]
            + ["--ssl-ca-certfile", str(self.certificates / CA_CERTIFICATE)]
            + ["--ssl-certfile", str(self.certificates / SERVER_CERTIFICATE)]
            + ["--ssl-keyfile", str(self.certificates / SERVER_KEY)]
            + ["--enable-supernode-auth", "--disable-runtime-dependency-installation"],
            home,
        )
        started.wait_for("Uvicorn running", START_LIMIT)
        return started

    def start_node(
        self,
        number: int,
        *,
        key: Path | None = None,
        root: Path | None = None,
        keyless: bool = False,
        name: str = "",
        wait: bool = True,
    ) -> Process:
        """Start a SuperNode, by default with its own key and the right CA certificate."""
        name = name or node_name(number)
        port, authority = free_port(), root or self.certificates / CA_CERTIFICATE
        command = [*self.supernode, "--superlink", self.address, "--root-certificates", str(authority)]
        command += ["--host", HOST, "--port", str(port), "--node-config", self.node_configs[number - 1]]
        if not keyless:
            command += ["--auth-supernode-private-key", str(key or self.certificates / node_name(number))]
        if self.executor:
            command += ["--isolation", "process"]
        started = self.start(name, command, self.home(name))
        if self.executor:
            self.start(executor_name(name), [*self.executor, f"{HOST}:{port}"], self.home(name))
        if wait:
            started.wait_for("SuperNode ID:", START_LIMIT)
        return started

    def node(self, number: int) -> Process:
        return self.processes[node_name(number)]

    def kill_node(self, number: int) -> None:
        """Kill a SuperNode and all it has started, as a power cut would. The SuperLink takes it for online for another minute."""
        for name in (executor_name(node_name(number)), node_name(number)):
            process = self.processes.pop(name, None)
            if process is not None:
                end(process)

    def stop_node(self, number: int) -> None:
        """Request a SuperNode to stop; it says goodbye, so that it may come back at once."""
        self.node(number).handle.terminate()
        self.node(number).wait(STOP_LIMIT)
        self.kill_node(number)

    def restart_node(self, number: int, limit: float = RETURN_LIMIT) -> Process:
        """Start a killed SuperNode again and again until the SuperLink lets it in, as a service manager would."""
        deadline = time.monotonic() + limit
        while True:
            started = self.start_node(number, wait=False)
            try:
                started.wait_for("SuperNode ID:", START_LIMIT)
                return started
            except HarnessError:
                if time.monotonic() > deadline or "Failed to activate SuperNode" not in started.log:
                    raise
                self.kill_node(number)
                time.sleep(5)

    def start(self, name: str, command: Sequence[str], home: Path) -> Process:
        log_file = self.folder / "logs" / f"{name}.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        program = [str(PROGRAMS / command[0]), *command[1:]]
        self.processes[name] = logged_process(name, program, log_file, self.variables(home), home)
        return self.processes[name]

    def home(self, name: str) -> Path:
        """Flower's own folder: one for each process, as if each ran on a machine of its own."""
        folder = self.folder / "homes" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def variables(self, home: Path) -> dict[str, str]:
        # The SuperLink and the SuperNodes look for flower-superexec, flwr-serverapp and flwr-clientapp on the PATH.
        path = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, **QUICK, **self.environment, "PATH": path, "FLWR_HOME": str(home), MARK: self.mark}

    # ----------------------------------------------------------------------------------------------------------- runs
    def flwr(self, *words: str, limit: float = COMMAND_LIMIT) -> str:
        """Run ``flwr`` and return what it printed."""
        try:
            done = subprocess.run(
                [str(PROGRAMS / "flwr"), *words],
                env=self.variables(self.home("link")),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as error:
            raise HarnessError(f"flwr {' '.join(words)} did not end within {limit:g} s.") from error
        if done.returncode:
            raise HarnessError(f"flwr {' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def register(self, *numbers: int) -> None:
        """Tell the SuperLink the public keys of nodes."""
        for number in numbers:
            self.flwr("supernode", "register", str(self.certificates / f"{node_name(number)}.pub"), LINK)

    def submit(self, app: Path, *words: str) -> Process:
        """Start a run with ``flwr run``; the process streams the ServerApp's log and ends with the run."""
        count = sum(name.startswith("run-") for name in self.processes) + 1
        return self.start(f"run-{count}", ["flwr", "run", str(app), LINK, "--stream", *words], self.home("link"))

    def ended(self, run: Process, limit: float = RUN_LIMIT) -> Ended:
        """Wait for the end of a run and ask the SuperLink how it ended."""
        begin = time.monotonic()
        run.wait(limit)
        number = re.search(r"Successfully started run (\d+)", run.log)
        if number is None:
            raise HarnessError(f"flwr run was refused:\n{run.log[-3000:]}")
        told = json.loads(self.flwr("list", LINK, "--run-id", number.group(1), "--format", "json"))["runs"][0]
        return Ended(number.group(1), told["status"], told["status-details"], time.monotonic() - begin, run.log)

    def run(self, app: Path, *words: str, limit: float = RUN_LIMIT) -> Ended:
        """Run an app to its end; the caller looks at the status."""
        return self.ended(self.submit(app, *words), limit)

    # -------------------------------------------------------------------------------------------------------- the end
    def close(self) -> None:
        """End every process this trial started, also those that left its process groups; wait until they are gone."""
        for process in self.processes.values():
            end(process)
        self.processes.clear()
        for _ in range(50):
            left = list(self.left())
            if not left:
                return
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.1)
        raise HarnessError(f"processes {left} of this trial would not end")

    def left(self) -> Iterator[int]:
        """Processes with this trial's mark in their environment."""
        wanted = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in entry.read_bytes().split(b"\0"):
                    yield int(entry.parent.name)
