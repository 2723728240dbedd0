"""Start child processes that log to private files and end with this process, even if it is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyfed.flower.deploy.private_files import OTHERS
from polyfed.runs.folder.atomic_write import PRIVATE_FILE

PROGRAMS = Path(sys.executable).parent
LOOPBACK = "127.0.0.1"
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""No telemetry, no update check, no installations, and ten polls for work per second."""


@dataclass
class Child:
    handle: subprocess.Popen[bytes]
    log: Path
    log_start: int

    @property
    def alive(self) -> bool:
        return self.handle.poll() is None

    def output(self) -> str:
        """Return the log since the process started."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def stop(self, seconds: float = 10.0) -> None:
        """Terminate the process, and kill it if it does not end."""
        with contextlib.suppress(ProcessLookupError):
            self.handle.terminate()
        try:
            self.handle.wait(seconds)
        except subprocess.TimeoutExpired:
            self.handle.kill()
            self.handle.wait()


def start(name: str, command: Sequence[str], logs: Path, variables: Mapping[str, str], dies_by: int) -> Child:
    """Start a process, which receives the signal ``dies_by`` when this process ends."""
    program = command[0] if os.sep in command[0] else str(PROGRAMS / command[0])
    # Flower starts programs by name.
    path = f"{PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}"
    log = logs / f"{name}.log"

    def die_with_parent() -> None:
        # A separate process group, so that Ctrl+C reaches only the parent, which then ends its children in order.
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, dies_by)

    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE), "ab") as output:
        log_start = output.seek(0, os.SEEK_END)
        handle = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **QUIET, "PATH": path, "PYTHONUNBUFFERED": "1", **variables},
            preexec_fn=die_with_parent,
        )
    return Child(handle, log, log_start)


def be_private_and_stoppable(advice: str = "") -> None:
    """Make new files private, and handle SIGTERM like an interrupt."""

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"stopped by signal {number}{advice}.")

    os.umask(OTHERS)
    signal.signal(signal.SIGTERM, interrupted)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        return int(taken.getsockname()[1])


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), 0.5):
        return True
    return False


def tail(text: str, lines: int) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
