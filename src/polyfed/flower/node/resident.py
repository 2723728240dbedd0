"""A resident process on a node: holds data, model and torch, and answers over a unix socket what short-lived processes pass on.

It is started by the first message, ends by itself when nothing was asked for some minutes or when the process that runs ClientApps is
gone, and is started again when it died: all that must last is on disk. The socket lies in a folder that only this user may enter.
"""

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
LOOK_EVERY = 2.0
SETTINGS, CONFIG, WATCHED, IDLE, PATHS = "settings", "config", "watched", "idle", "paths"
STARTED: list[subprocess.Popen[bytes]] = []


# ------------------------------------------------------------------------------------------------ the short-lived side
def ask_resident(settings: str, config: Mapping[str, Any], wire_message: WireMessage) -> WireMessage:
    """Pass an ask on to the resident process, which is started where there is none; one that dies meanwhile is started again."""
    address = socket_path(settings, config)
    problem = ""
    for _ in range(TRIES):
        try:
            with connected(address, settings, config) as connection:
                send(connection, wire_message)
                return receive(connection)
        except (ConnectionError, BadMessage) as error:
            problem = f"{type(error).__name__}: {error}"
    return refusal(f"The resident process of this node ended twice while it worked ({problem}); see {log_path(address)}.")


@contextlib.contextmanager
def connected(address: Path, settings: str, config: Mapping[str, Any]) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        with address.with_suffix(".lock").open("a") as lock:
            # Two messages at the same time must not start two processes.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _reached(connection, address):
                start(address, settings, config)
                end = time.monotonic() + START_LIMIT
                while not _reached(connection, address):
                    if time.monotonic() > end:
                        raise ClientFailure(
                            f"The resident process of this node did not start within {START_LIMIT:g} s; see {log_path(address)}."
                        )
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
        # The app's own files (methods, models) are found where this process finds them.
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
    """Where the resident process for these settings and this node listens."""
    key = json.dumps([settings, sorted(config.items()), sys.version, os.environ.get("FLWR_HOME", "")], default=str)
    name = f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.sock"
    return socket_in(home_of(config) / "resident", name)


def log_path(address: Path) -> Path:
    return address.with_suffix(".log")


def process_mark(number: int) -> str:
    """A process by its number and when it began, so that another one with the same number is not taken for it; empty: none."""
    try:
        line = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return ""
    state, *others = line.rsplit(")", 1)[1].split()
    return "" if state in "ZX" else f"{number}:{others[18]}"


# ----------------------------------------------------------------------------------------------------- the resident side
def take_paths(address: Path) -> None:
    """Find modules where the process that asked finds them."""
    job = json.loads(address.with_suffix(".json").read_text())
    sys.path.extend(path for path in job[PATHS] if path not in sys.path)


def serve(address: Path) -> None:
    """Answer until nothing is asked any more."""
    job = json.loads(address.with_suffix(".json").read_text())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Bound before torch is imported: whoever comes meanwhile waits in the queue.
    listener.bind(str(address))
    address.chmod(0o600)
    listener.listen(8)
    listener.settimeout(LOOK_EVERY)
    mine = address.stat().st_ino
    end_when_gone(job[WATCHED], "The process that runs ClientApps")
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
                    log.warning("The process that asked has gone (%s).", error)
            last = time.monotonic()
    finally:
        with contextlib.suppress(FileNotFoundError):
            if address.stat().st_ino == mine:
                address.unlink()


def end_when_gone(mark: str, who: str) -> None:
    """End this process when the one it works for is gone, even in the middle of work: nobody waits for the answer any more."""

    def watch() -> None:
        # A process that is not known is taken to run.
        while not mark or process_mark(int(mark.split(":")[0])) == mark:
            time.sleep(LOOK_EVERY)
        log.warning("%s has gone.", who)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def answer(wire_message: WireMessage, job: Mapping[str, Any]) -> WireMessage:
    """The node's answer; whatever fails is written to the log and reported."""
    # Imports torch, so not at the top: the short-lived side of this module must start fast.
    from polyfed.flower.node.node import build_node

    try:
        return build_node(read_settings(job[SETTINGS]), job[CONFIG]).answer(wire_message)
    except Exception as error:
        log.exception("An ask could not be answered.")
        return refusal(f"{type(error).__name__}: {error}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    keep_freed_pages()
    take_paths(Path(sys.argv[1]))
    serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
