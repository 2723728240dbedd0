"""Flower's requests over Python's own HTTP client, which reads a large answer straight into its place.

Flower sends and fetches models in pieces of 5 MB with httpx, whose parser takes an answer apart in steps of 16 to 64 kB. That costs more
than half of the processor time of the side that fetches. httpx takes the place of its network from a transport, so this is one.
"""

from __future__ import annotations

import functools
import http.client
import logging
import select
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx

log = logging.getLogger("polyfed")

PIECE = 64 * 1024
USUAL_TIMEOUT = 30.0


class DirectTransport(httpx.BaseTransport):
    """Sends requests over connections that are kept open and used by one request at a time; errors are those of httpx.

    Args:
        context: TLS of https addresses.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.lock = threading.Lock()
        self.idle: dict[tuple[bytes, bytes, int | None], list[http.client.HTTPConnection]] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        waits = request.extensions.get("timeout", {})
        connection = self._connection(request, waits.get("connect", USUAL_TIMEOUT))
        try:
            answer = _answer(connection, request, waits)
        except BaseException:
            connection.close()
            raise
        stream = _Body(answer, functools.partial(self._done, request, connection))
        return httpx.Response(answer.status, headers=answer.getheaders(), stream=stream, request=request)

    def _connection(self, request: httpx.Request, timeout: float | None) -> http.client.HTTPConnection:
        waiting = self.idle.setdefault(_origin(request), [])
        while True:
            with self.lock:
                if not waiting:
                    break
                connection = waiting.pop()
            if not _was_closed(connection):
                return connection
            connection.close()
        host, port = request.url.host, request.url.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=timeout, context=self.context)
            if request.url.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=timeout)
        )
        try:
            connection.connect()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection

    def _done(self, request: httpx.Request, connection: http.client.HTTPConnection, again: bool) -> None:
        """The answer was read, or given up: a connection that can be used again is kept."""
        if not again:
            connection.close()
            return
        with self.lock:
            self.idle[_origin(request)].append(connection)

    def close(self) -> None:
        with self.lock:
            for connection in [connection for connections in self.idle.values() for connection in connections]:
                connection.close()
            self.idle.clear()


def _origin(request: httpx.Request) -> tuple[bytes, bytes, int | None]:
    return request.url.raw_scheme, request.url.raw_host, request.url.port


def _was_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the other side ended a connection that nothing was asked on: only then is there something to read."""
    if connection.sock is None:
        return True
    looked = select.poll()
    looked.register(connection.sock, select.POLLIN)
    return bool(looked.poll(0))


def _answer(connection: http.client.HTTPConnection, request: httpx.Request, waits: dict[str, Any]) -> http.client.HTTPResponse:
    unsent: OSError | None = None
    connection.sock.settimeout(waits.get("write", USUAL_TIMEOUT))
    try:
        connection.putrequest(request.method, request.url.raw_path.decode("ascii"), skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.raw:
            connection.putheader(name.decode("ascii"), value)
        connection.endheaders(request.read() or None)
    except TimeoutError as error:
        raise httpx.WriteTimeout(str(error)) from error
    except OSError as error:
        # A server that refuses a large body answers before it has read it, and closes. Its answer is what counts.
        unsent = error
    connection.sock.settimeout(waits.get("read", USUAL_TIMEOUT))
    try:
        return connection.getresponse()
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except OSError as error:
        raise (httpx.WriteError(str(unsent)) if unsent else httpx.ReadError(str(error))) from error
    except http.client.HTTPException as error:
        raise httpx.RemoteProtocolError(str(error)) from error


class _Body(httpx.SyncByteStream):
    """The body of an answer: at once where its length is known, else as it comes."""

    def __init__(self, answer: http.client.HTTPResponse, done: Any) -> None:
        self.answer, self.done = answer, done
        self.whole = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            if self.answer.length is not None:
                yield self.answer.read()
            else:
                while piece := self.answer.read1(PIECE):
                    yield piece
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        except http.client.HTTPException as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        self.whole = True

    def close(self) -> None:
        if self.done is not None:
            again = self.whole and not self.answer.will_close
            done, self.done = self.done, None
            done(again)


def send_directly() -> bool:
    """Let Flower's clients that are made in this process from now on send directly; False where that is not possible.

    Where the environment names a proxy, httpx stays, since it knows proxies.
    """
    try:
        from flwr.supercore.protobuf.client import ProtobufClient
    except ImportError:
        log.info("This release of Flower has no ProtobufClient: its own way to send stays.")
        return False
    if _proxies():
        return False
    if hasattr(ProtobufClient.__init__, "__wrapped__"):
        return True
    before = ProtobufClient.__init__

    @functools.wraps(before)
    def made(self: Any, base_url: str, *, verify: ssl.SSLContext | bool | str = True, **others: Any) -> None:
        before(self, base_url, verify=verify, **others)
        self._client.close()
        self._client = _direct_client(_context(verify), self._client.timeout)

    ProtobufClient.__init__ = made
    return True


def send_over_grid_directly(grid: Any) -> bool:
    """The same for the Grid of a ServerApp, which has its client before the ServerApp begins."""
    client = getattr(grid, "_runtime_client", None)
    before = getattr(client, "_client", None)
    if not isinstance(before, httpx.Client) or _proxies():
        return False
    context = httpx.create_ssl_context()
    if certificates := getattr(grid, "_cert", None):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=certificates.decode("ascii"))
    # Not closed: Flower's heartbeat may be in the middle of a request.
    client._client = _direct_client(context, before.timeout)  # type: ignore[union-attr]
    return True


def _proxies() -> bool:
    return bool(set(urllib.request.getproxies()) & {"http", "https", "all"})


def _direct_client(context: ssl.SSLContext, timeout: httpx.Timeout) -> httpx.Client:
    return httpx.Client(transport=DirectTransport(context), timeout=timeout, follow_redirects=True)


def _context(verify: ssl.SSLContext | bool | str) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext):
        return verify
    return ssl.create_default_context(cafile=verify) if isinstance(verify, str) else httpx.create_ssl_context(verify=verify)
