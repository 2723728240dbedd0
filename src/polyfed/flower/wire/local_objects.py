"""What a SuperNode and its ClientApps give each other, over a unix socket instead of HTTP.

A model passes between the two in chunks of 5 MB, both ways, on one machine. Over HTTP each chunk is taken apart into pieces of 64 kB, each
of which wakes up all layers of a web server; a chunk that is not there yet is asked for again after 1, 2, 4 and 8 s; and who runs
ClientApps asks for work many times a second. Over the socket, who asks is answered when there is something. It lies in a folder that
only this account may enter. Where a SuperNode has none, as Flower's own, HTTP is used.
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
LOOK_AGAIN = 0.02
"""Seconds between two looks into the SuperNode's own memory for an object that is still on its way."""
LONGEST_WAIT = 5.0
"""Seconds after which who waits for work is told to look in any case."""


def place_of(address: str) -> Path:
    """The socket of the SuperNode with this address of its Runtime."""
    home = get_flwr_home()
    name = hashlib.sha256(f"{home.resolve()} {address}".encode()).hexdigest()[:16]
    return socket_in(home / "polyfed", f"{name}.sock")


def send(connection: socket.socket, head: dict[str, Any], content: bytes = b"") -> None:
    text = json.dumps({**head, "size": len(content)}).encode()
    connection.sendall(len(text).to_bytes(LENGTH, "little") + text)
    # Who got all of a question may have answered it and gone: to send nothing would be an error then.
    if content:
        connection.sendall(content)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(_exactly(connection, LENGTH), "little")
    if length > LONGEST_HEAD:
        raise ValueError(f"a head of {length} bytes")
    head: dict[str, Any] = json.loads(_exactly(connection, length))
    return head, _exactly(connection, int(head["size"]))


def _exactly(connection: socket.socket, count: int) -> bytes:
    # As bytes, which Flower stores as they are. They come at once, unless a signal cuts the wait short.
    pieces: list[bytes] = []
    while count:
        pieces.append(connection.recv(count, socket.MSG_WAITALL))
        if not pieces[-1]:
            raise ConnectionResetError("the other side ended in the middle of an object")
        count -= len(pieces[-1])
    return b"".join(pieces)


# -------------------------------------------------------------------------------------------------------- the SuperNode
def offer_objects(program: ModuleType) -> None:
    """Let the SuperNode that Flower's program starts in this process offer its objects on a socket too."""
    before = program.start_client_internal

    def started(*, state_factory: Any, runtime_api_address: str, **others: Any) -> None:
        state = state_factory.state()
        serve(place_of(runtime_api_address), state, counted_tasks(state))
        before(state_factory=state_factory, runtime_api_address=runtime_api_address, **others)

    vars(program).update(start_client_internal=started)


def counted_tasks(state: Any) -> threading.Semaphore:
    """A semaphore that counts the tasks that the SuperNode makes from now on."""
    made, before = threading.Semaphore(0), state.create_task

    def create_task(*words: Any, **named: Any) -> Any:
        task = before(*words, **named)
        made.release()
        return task

    state.create_task = create_task
    return made


def serve(place: Path, state: Any, tasks: threading.Semaphore) -> socketserver.ThreadingUnixStreamServer:
    """Answer what is asked of a SuperNode's state, in threads, until the process ends."""

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
    """Wait for a task, store an object, or find one: the same calls that the Runtime makes."""
    if "object" not in head:
        return {"task": tasks.acquire(timeout=LONGEST_WAIT)}, b""
    if "session" in head:
        return {"stored": state.store_object(head["run"], head["session"], head["object"], content)}, b""
    while (found := state.get_object(head["run"], head["object"])) == b"":
        time.sleep(LOOK_AGAIN)
    return {"found": found is not None}, found or b""


# ------------------------------------------------------------------------------------------------------- the ClientApp
def use_objects(clientapp: ModuleType, address: str) -> None:
    """Let ClientApps that Flower's module runs in this process use the socket of their SuperNode, where it has one."""
    place = place_of(address)
    pull_before: Callable[[Any, Node, int], Pull] = clientapp.make_pull_object_fn_protobuf
    push_before: Callable[[Any, Node, int, str], Push] = clientapp.make_push_object_fn_protobuf

    def pulling(call: Any, node: Node, run_id: int) -> Pull:
        return pull_from(place, run_id) if is_offered(place) else pull_before(call, node, run_id)

    def pushing(call: Any, node: Node, run_id: int, session_id: str) -> Push:
        return push_to(place, run_id, session_id) if is_offered(place) else push_before(call, node, run_id, session_id)

    vars(clientapp).update(make_pull_object_fn_protobuf=pulling, make_push_object_fn_protobuf=pushing)


def waiting_for_work(address: str) -> socket.socket | None:
    """A connection that can be read from when there may be work; None where the SuperNode has no socket."""
    try:
        connection = connected(place_of(address))
        send(connection, {})
    except OSError:
        return None
    return connection


def is_offered(place: Path) -> bool:
    """Whether a SuperNode listens there; the socket of one that was killed is still there."""
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
    """What fetches an object; errors are those of Flower's own."""

    def pull(object_id: str) -> bytes:
        with connected(place) as connection:
            send(connection, {"run": run, "object": object_id})
            head, content = receive(connection)
        if not head["found"]:
            raise ObjectPullError(object_id, "the object could not be found.")
        return content

    return pull


def push_to(place: Path, run: int, session: str) -> Push:
    """What stores an object; errors are those of Flower's own."""

    def push(object_id: str, content: bytes) -> None:
        with connected(place) as connection:
            send(connection, {"run": run, "object": object_id, "session": session}, content)
            if not receive(connection)[0]["stored"]:
                raise ObjectPushError(object_id, run, session)

    return push
