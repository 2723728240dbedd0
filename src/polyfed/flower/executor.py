"""A warm executor: runs the ClientApps of a SuperNode without starting Python again for every message.

    flower-supernode ... --isolation process --host 127.0.0.1 --port 9094
    python -m polyfed.flower.executor 127.0.0.1:9094

Flower's own SuperExec starts a process for each message, which then imports all of Flower. This one has imported everything, torch
included, and forks: for each message a process that ends with it, and for each run a resident process (``resident.py``) that holds data
and model. It stays a single thread, so that forking is safe, and talks to the node on the same machine only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import flwr.supernode.runtime.run_clientapp as clientapp
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient

import polyfed.flower.node.node  # noqa: F401 - imported now, so that what is forked need not
from polyfed.flower.node import resident
from polyfed.flower.wire.direct_http import send_directly
from polyfed.flower.wire.lean_objects import lean_arrays
from polyfed.flower.wire.local_objects import use_objects, waiting_for_work
from polyfed.flower.wire.waits import shorten_clientapp
from polyfed.runs.malloc import keep_freed_pages

log = logging.getLogger("polyfed")
PAUSE = 0.1
"""Seconds between two looks for work, where the SuperNode does not say when there is some."""


def run(address: str, secret: bytes | None = None) -> None:
    """Work for the node with this address until it is ended; ``secret`` is that of its Runtime, where it asks for one."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # It would log every look for work.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # What is forked has inherited it.
    keep_freed_pages()
    send_directly()
    lean_arrays()
    use_objects(clientapp, address)
    shorten_clientapp()
    # Nobody waits for the processes that are forked.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
    if secret is not None:
        protected = ("/flwr.proto.Runtime/AcquireTask",)
        interceptors.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=protected))
    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,
        root_certificates=None,
        interceptors=interceptors,
        retry_invoker=make_simple_http_retry_invoker(),
    )
    wanted, wish = os.pipe()
    log.info("Ready.")
    while True:
        acquired = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if acquired.HasField("task") and acquired.token:
            _forked(partial(answer, address, acquired.token, wish))
        for place in _wishes_until_work(address, wanted):
            _forked(partial(_reside, place))


def _wishes_until_work(address: str, wanted: int) -> Iterator[Path]:
    """Return when there may be work; meanwhile, the places of resident processes that ClientApps wish for."""
    work = waiting_for_work(address)
    with work or contextlib.nullcontext():
        while True:
            ends: list[int | socket.socket] = [wanted, work] if work else [wanted]
            ready, _, _ = select.select(ends, [], [], None if work else PAUSE)
            if wanted in ready:
                yield from map(Path, os.read(wanted, select.PIPE_BUF).decode().splitlines())
            if work in ready or not work:
                return


def _forked(work: Callable[[], None]) -> None:
    if os.fork():
        return
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        work()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def answer(node: str, token: str, wish: int) -> None:
    """Run the ClientApp for one message; a resident process it needs is forked by the executor."""

    def launch(address: Path) -> None:
        os.write(wish, f"{address}\n".encode())

    resident.launch = launch
    clientapp.run_clientapp(node, token, insecure=True, runtime_dependency_install=False)


def _reside(address: Path) -> None:
    os.setsid()
    with resident.log_path(address).open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    resident.take_paths(address)
    resident.serve(address)


if __name__ == "__main__":
    run(sys.argv[1])
