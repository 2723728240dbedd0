"""The ServerApp of a server that means harm: it connects to the test, and sends nodes what the test says (``helpers/hostile_server.py``).

It imports little, since a process is started for every run.
"""

from __future__ import annotations

import logging
import os
import socket

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from polyfed.flower.wire.direct_http import send_over_grid_directly
from polyfed.flower.wire.lean_objects import lean_arrays
from polyfed.flower.wire.message import WireMessage, receive, refusal, send
from polyfed.flower.wire.records import wire_message_of
from polyfed.flower.wire.transport import Transport
from polyfed.flower.wire.waits import shorten_server

SERVER_APP = "helpers.hostile_app:app"
PORT = "POLYFED_TEST_HOSTILE_PORT"
RUN, NODE, CATEGORY, ASK = "run", "node", "category", "ask"
LEAST, CLIENTS, SAID = "least", "clients", "said"
HERE = "127.0.0.1"
LONG = 1800.0
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Pass on what the test says, until it closes the connection."""
    shorten_server()
    lean_arrays()
    send_over_grid_directly(grid)
    with socket.create_connection((HERE, int(os.environ[PORT]))) as test:
        send(test, WireMessage({RUN: str(context.run_id)}))
        while True:
            try:
                told = receive(test)
            except ConnectionResetError:
                return
            if LEAST in told.control:
                send(test, gathered(Transport(grid), int(told.control[LEAST])))
                continue
            asked = WireMessage(told.control[ASK], told.blobs)
            send(test, passed_on(Transport(grid), asked, int(told.control[NODE]), str(told.control[CATEGORY])))


def passed_on(transport: Transport, asked: WireMessage, node: int, category: str) -> WireMessage:
    """A node's answer; an error of Flower's is told as a refusal."""
    message = transport.wait(transport.send({node: asked}, category, "1", LONG)[node])
    if message is None:
        return refusal("no answer")
    return refusal(message.error.reason) if message.has_error() else wire_message_of(message.content)


def gathered(transport: Transport, least: int) -> WireMessage:
    """Who may take part in a run, as polyfed's own server finds out, and what it says of the others."""
    from polyfed.flower.server.roster import Roster

    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("polyfed")
    log.addHandler(listener)
    try:
        return WireMessage({CLIENTS: [node.client for node in Roster(transport).gather(least, LONG)], SAID: said})
    finally:
        log.removeHandler(listener)
