"""The resident process of a node, which keeps data and model in memory and handles requests from short-lived processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import ClientFailure
from polyfed.flower.app import read_settings
from polyfed.flower.deploy.private_files import home_of, socket_in
from polyfed.flower.wire.message import BadMessage, WireMessage, receive, refusal, send
from polyfed.runs.malloc import keep_freed_pages

log = logging.getLogger("polyfed")

IDLE_MINUTES = 15.0
START_LIMIT = 180.0
TRIES = 2
POLL_SECONDS = 2.0
SETTINGS, CONFIG, WATCHED, IDLE, PATHS = "settings", "config", "watched", "idle", "paths"
STARTED: list[subprocess.Popen[bytes]] = []


def ask_resident(settings: str, config: Mapping[str, Any], wire_message: WireMessage) -> WireMessage:
    """Pass a request to the resident process, starting it if necessary. If the process dies during the request, retry once."""
    address = socket_path(settings, config)
    problem = ""
    for _ in range(TRIES):
        try:
            with connected(address, settings, config) as connection:
                send(connection, wire_message)
                return receive(connection)
        except (ConnectionError, BadMessage) as error:
            problem = f"{type(error).__name__}: {error}"
    return refusal(f"The resident process of this node ended twice during the request ({problem}). See {log_path(address)}.")


@contextlib.contextmanager
def connected(address: Path, settings: str, config: Mapping[str, Any]) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        with address.with_suffix(".lock").open("a") as lock:
            # Concurrent messages must not start two processes.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _reached(connection, address):
                start(address, settings, config)
                end = time.monotonic() + START_LIMIT
                while not _reached(connection, address):
                    if time.monotonic() > end:
                        problem = f"The resident process of this node did not start within {START_LIMIT:g} s."
                        raise ClientFailure(f"{problem} See {log_path(address)}.")
                    time.sleep(0.05)
        yield connection


def _reached(connection: socket.socket, address: Path) -> bool:
    try:
        connection.connect(str(address))
    except (FileNotFoundError, ConnectionError):
        return False
    return True


def start(address: Path, settings: str, config: Mapping[str, Any]) -> None:
    address.unlink(missing_ok=True)
    job = {
        SETTINGS: settings,
        CONFIG: dict(config),
        WATCHED: process_mark(os.getppid()),
        IDLE: float(config.get("idle-minutes", IDLE_MINUTES)),
        # Import paths of the app's files (methods, models).
        PATHS: [path for path in sys.path if path],
    }
    address.with_suffix(".json").write_text(json.dumps(job))
    launch(address)


def launch(address: Path) -> None:
    with log_path(address).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "polyfed.flower.node.resident", str(address)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    STARTED[:] = [known for known in STARTED if known.poll() is None] + [process]


def socket_path(settings: str, config: Mapping[str, Any]) -> Path:
    """Return the socket of the resident process for these settings and this node."""
    key = json.dumps([settings, sorted(config.items()), sys.version, os.environ.get("FLWR_HOME", "")], default=str)
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.sock"
    return socket_in(home_of(config) / "resident", name)


def log_path(address: Path) -> Path:
    return address.with_suffix(".log")


def process_mark(number: int) -> str:
    """Identify a process by its number and start time, since numbers are reused; empty if it does not run."""
    try:
        line = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return ""
    state, *others = line.rsplit(")", 1)[1].split()
    return "" if state in "ZX" else f"{number}:{others[18]}"


def take_paths(address: Path) -> None:
    """Use the import paths of the process that sent the request."""
    job = json.loads(address.with_suffix(".json").read_text())
    sys.path.extend(path for path in job[PATHS] if path not in sys.path)


def serve(address: Path) -> None:
    """Handle requests until none arrive for the idle time."""
    job = json.loads(address.with_suffix(".json").read_text())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Bind before importing torch, so that early requests are queued.
    listener.bind(str(address))
    address.chmod(0o600)
    listener.listen(8)
    listener.settimeout(POLL_SECONDS)
    mine = address.stat().st_ino
    exit_with(job[WATCHED], "The ClientApp launcher")
    last = time.monotonic()
    try:
        while time.monotonic() - last < 60 * job[IDLE]:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                connection.setblocking(True)
                try:
                    send(connection, answer(receive(connection), job))
                except ConnectionError as error:
                    log.warning("The requesting process exited (%s).", error)
            last = time.monotonic()
    finally:
        with contextlib.suppress(FileNotFoundError):
            if address.stat().st_ino == mine:
                address.unlink()


def exit_with(mark: str, description: str) -> None:
    """Exit this process when the marked one exits, even in the middle of a request, since its reply is no longer needed."""

    def watch() -> None:
        # Without a mark, assume that the process runs.
        while not mark or process_mark(int(mark.split(":")[0])) == mark:
            time.sleep(POLL_SECONDS)
        log.warning("%s exited.", description)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def answer(wire_message: WireMessage, job: Mapping[str, Any]) -> WireMessage:
    """Return the node's reply; errors are logged and become a refusal."""
    # Not at the top: it imports torch, and the short-lived side of this module must start fast.
    from polyfed.flower.node.node import build_node

    try:
        return build_node(read_settings(job[SETTINGS]), job[CONFIG]).answer(wire_message)
    except Exception as error:
        log.exception("The request failed.")
        return refusal(f"{type(error).__name__}: {error}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    keep_freed_pages()
    take_paths(Path(sys.argv[1]))
    serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
