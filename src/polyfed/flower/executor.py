"""A warm executor: runs the ClientApps of a SuperNode without starting Python for every message.

    flower-supernode ... --isolation process --host 127.0.0.1 --port 9094
    python -m polyfed.flower.executor 127.0.0.1:9094

Flower's SuperExec starts a process for each message, which imports all of Flower. This executor has imported everything, including
torch, and forks a short-lived process per message and a resident process (``resident.py``) per run, which holds data and model. It has
a single thread, so that forking is safe, and connects only to the node on the same machine.
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

import polyfed.flower.node.node  # noqa: F401 - imported before forking
from polyfed.flower.node import resident
from polyfed.flower.wire.direct_http import send_directly
from polyfed.flower.wire.lean_objects import lean_arrays
from polyfed.flower.wire.local_objects import use_objects, waiting_for_work
from polyfed.flower.wire.waits import shorten_clientapp
from polyfed.runs.malloc import keep_freed_pages

log = logging.getLogger("polyfed")
PAUSE = 0.1  # seconds between polls for work, if the SuperNode does not signal it


def run(address: str, secret: bytes | None = None) -> None:
    """Run tasks for the node at this address until the process is stopped. ``secret`` is its Runtime's secret, if it has one."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # httpx would log every poll.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # Forked processes inherit these changes.
    keep_freed_pages()
    send_directly()
    lean_arrays()
    use_objects(clientapp, address)
    shorten_clientapp()
    # Forked processes are not waited on.
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
    wanted, launch_pipe = os.pipe()
    log.info("Ready.")
    while True:
        acquired = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if acquired.HasField("task") and acquired.token:
            _forked(partial(answer, address, acquired.token, launch_pipe))
        for place in _launches_until_work(address, wanted):
            _forked(partial(_run_resident, place))


def _launches_until_work(address: str, wanted: int) -> Iterator[Path]:
    """Yield the sockets of resident processes that ClientApps request, until there may be work."""
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


def answer(node: str, token: str, launch_pipe: int) -> None:
    """Run the ClientApp for one message. If it needs a resident process, the executor forks it."""

    def launch(address: Path) -> None:
        os.write(launch_pipe, f"{address}\n".encode())

    resident.launch = launch
    clientapp.run_clientapp(node, token, insecure=True, runtime_dependency_install=False)


def _run_resident(address: Path) -> None:
    os.setsid()
    with resident.log_path(address).open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    resident.take_paths(address)
    resident.serve(address)


if __name__ == "__main__":
    run(sys.argv[1])
