"""A TLS forwarder with the node's certificate, which Flower's SuperNode cannot present itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from polyfed.flower.deploy.processes import LOOPBACK

log = logging.getLogger("polyfed")

PIECE = 256 * 1024
CONNECT_SECONDS = 20.0
CONNECTIONS = Path("/proc/net/tcp")


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context


def client_context(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Return a TLS context that trusts only this authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(authority)
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context


class Forwarder:
    """Forwards connections until the process ends.

    Args:
        listening: TLS context of the listening side.
        connecting: Creates the TLS context of each outgoing connection, so that a renewed certificate is used at once.
        host: Name or address of the server.
        port: Port of the server.
        rejected: Called when another account of this machine connects.
    """

    def __init__(
        self,
        listening: ssl.SSLContext,
        connecting: Callable[[], ssl.SSLContext],
        host: str,
        port: int,
        rejected: Callable[[int], None],
    ) -> None:
        self.listening, self.connecting, self.host, self.port, self.rejected = listening, connecting, host, port, rejected
        self.local_port = 0
        self.ready = threading.Event()
        self.running: set[asyncio.Task[None]] = set()

    def start(self) -> int:
        """Listen in a thread and return the port."""
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self.ready.wait()
        return self.local_port

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._forward, LOOPBACK, 0, ssl=self.listening, limit=PIECE)
        self.local_port = int(server.sockets[0].getsockname()[1])
        self.ready.set()
        async with server:
            await server.serve_forever()

    async def _forward(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        account = account_of(int(back.get_extra_info("peername")[1]), self.local_port)
        if account not in (None, os.getuid()):
            self.rejected(int(account or 0))
            back.close()
            return
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                far, onward = await asyncio.open_connection(
                    self.host, self.port, ssl=self.connecting(), server_hostname=self.host, limit=PIECE
                )
        except (OSError, TimeoutError) as error:
            log.warning("Cannot reach the server at %s:%d (%s).", self.host, self.port, error or type(error).__name__)
            back.close()
            return
        tasks = [asyncio.create_task(_pump(near, onward)), asyncio.create_task(_pump(far, back))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task, writer in zip(tasks, (onward, back), strict=True):
            task.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                writer.close()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()


def account_of(port: int, local_port: int) -> int | None:
    """Return the account of the process at the other end of a loopback connection, or None if it is unknown."""
    if not CONNECTIONS.exists():
        return None
    ends = f"0100007F:{port:04X}", f"0100007F:{local_port:04X}"
    for line in CONNECTIONS.read_text().splitlines()[1:]:
        fields = line.split()
        if (fields[1], fields[2]) == ends:
            return int(fields[7])
    return None
