"""Exchange objects between a SuperNode and its ClientApps over a unix socket instead of HTTP.

HTTP splits each chunk of 5 MB into pieces of 64 kB, retries a chunk that has not arrived after 1, 2, 4 and 8 s, and polls for work many
times per second. A SuperNode without a socket, such as Flower's own, is reached over HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError
from flwr.supercore.utils import get_flwr_home

from polyfed.flower.deploy.private_files import socket_in
from polyfed.flower.wire.message import LENGTH

log = logging.getLogger("polyfed")

Pull: TypeAlias = Callable[[str], bytes]
Push: TypeAlias = Callable[[str, bytes], None]
LONGEST_HEAD = 4096
POLL_SECONDS = 0.02  # seconds between polls of the SuperNode's memory for an object that has not arrived yet
LONGEST_WAIT = 5.0  # seconds after which a client that waits for work gets a reply in any case


def place_of(address: str) -> Path:
    """Return the socket of the SuperNode whose Runtime has this address."""
    home = get_flwr_home()
    name = hashlib.sha256(f"{home.resolve()} {address}".encode()).hexdigest()[:16]
    return socket_in(home / "polyfed", f"{name}.sock")


def send(connection: socket.socket, head: dict[str, Any], content: bytes = b"") -> None:
    text = json.dumps({**head, "size": len(content)}).encode()
    connection.sendall(len(text).to_bytes(LENGTH, "little") + text)
    # The receiver may have replied and closed by now, so that even sending nothing would fail.
    if content:
        connection.sendall(content)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(_exactly(connection, LENGTH), "little")
    if length > LONGEST_HEAD:
        raise ValueError(f"The header has {length} bytes.")
    head: dict[str, Any] = json.loads(_exactly(connection, length))
    return head, _exactly(connection, int(head["size"]))


def _exactly(connection: socket.socket, count: int) -> bytes:
    # Flower stores these bytes without a copy. A signal may interrupt recv, hence the loop.
    pieces: list[bytes] = []
    while count:
        pieces.append(connection.recv(count, socket.MSG_WAITALL))
        if not pieces[-1]:
            raise ConnectionResetError("the connection closed in the middle of an object")
        count -= len(pieces[-1])
    return b"".join(pieces)


def offer_objects(program: ModuleType) -> None:
    """Make the SuperNode that Flower's program starts in this process also offer its objects on a socket."""
    before = program.start_client_internal

    def started(*, state_factory: Any, runtime_api_address: str, **others: Any) -> None:
        state = state_factory.state()
        serve(place_of(runtime_api_address), state, counted_tasks(state))
        before(state_factory=state_factory, runtime_api_address=runtime_api_address, **others)

    vars(program).update(start_client_internal=started)


def counted_tasks(state: Any) -> threading.Semaphore:
    """Return a semaphore that is released for every new task of the SuperNode."""
    tasks, before = threading.Semaphore(0), state.create_task

    def create_task(*args: Any, **options: Any) -> Any:
        task = before(*args, **options)
        tasks.release()
        return task

    state.create_task = create_task
    return tasks


def serve(place: Path, state: Any, tasks: threading.Semaphore) -> socketserver.ThreadingUnixStreamServer:
    """Serve a SuperNode's state in threads until the process ends."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                send(self.request, *answer(state, tasks, *receive(self.request)))

    place.unlink(missing_ok=True)
    server = socketserver.ThreadingUnixStreamServer(str(place), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def answer(state: Any, tasks: threading.Semaphore, head: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
    """Wait for a task, store an object or return one, with the same calls as the Runtime."""
    if "object" not in head:
        return {"task": tasks.acquire(timeout=LONGEST_WAIT)}, b""
    if "session" in head:
        return {"stored": state.store_object(head["run"], head["session"], head["object"], content)}, b""
    while (found := state.get_object(head["run"], head["object"])) == b"":
        time.sleep(POLL_SECONDS)
    return {"found": found is not None}, found or b""


def use_objects(clientapp: ModuleType, address: str) -> None:
    """Make ClientApps in this process use the socket of their SuperNode, if it has one."""
    place = place_of(address)
    pull_before: Callable[[Any, Node, int], Pull] = clientapp.make_pull_object_fn_protobuf
    push_before: Callable[[Any, Node, int, str], Push] = clientapp.make_push_object_fn_protobuf

    def pulling(call: Any, node: Node, run_id: int) -> Pull:
        return pull_from(place, run_id) if is_offered(place) else pull_before(call, node, run_id)

    def pushing(call: Any, node: Node, run_id: int, session_id: str) -> Push:
        return push_to(place, run_id, session_id) if is_offered(place) else push_before(call, node, run_id, session_id)

    vars(clientapp).update(make_pull_object_fn_protobuf=pulling, make_push_object_fn_protobuf=pushing)


def waiting_for_work(address: str) -> socket.socket | None:
    """Return a connection that becomes readable when there may be work, or None if the SuperNode has no socket."""
    try:
        connection = connected(place_of(address))
        send(connection, {})
    except OSError:
        return None
    return connection


def is_offered(place: Path) -> bool:
    """Return True if a SuperNode listens; the socket file of a killed one remains."""
    try:
        connected(place).close()
    except OSError:
        return False
    return True


def connected(place: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(place))
    except OSError:
        connection.close()
        raise
    return connection


def pull_from(place: Path, run: int) -> Pull:
    def pull(object_id: str) -> bytes:
        with connected(place) as connection:
            send(connection, {"run": run, "object": object_id})
            head, content = receive(connection)
        if not head["found"]:
            raise ObjectPullError(object_id, "the object was not found.")
        return content

    return pull


def push_to(place: Path, run: int, session: str) -> Push:
    def push(object_id: str, content: bytes) -> None:
        with connected(place) as connection:
            send(connection, {"run": run, "object": object_id, "session": session}, content)
            if not receive(connection)[0]["stored"]:
                raise ObjectPushError(object_id, run, session)

    return push
