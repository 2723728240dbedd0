"""An httpx transport that sends Flower's requests with Python's HTTP client.

Flower sends models in pieces of 5 MB with httpx, which parses a response in steps of 16 to 64 kB. That takes more than half of the CPU
time of the receiver. Python's HTTP client reads a response of known length in one step.
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
DEFAULT_TIMEOUT = 30.0


class DirectTransport(httpx.BaseTransport):
    """Sends requests over persistent connections, each used by one request at a time, and raises httpx errors."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.lock = threading.Lock()
        self.idle: dict[tuple[bytes, bytes, int | None], list[http.client.HTTPConnection]] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        waits = request.extensions.get("timeout", {})
        connection = self._connection(request, waits.get("connect", DEFAULT_TIMEOUT))
        try:
            response = _send(connection, request, waits)
        except BaseException:
            connection.close()
            raise
        stream = _Body(response, functools.partial(self._release, request, connection))
        return httpx.Response(response.status, headers=response.getheaders(), stream=stream, request=request)

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

    def _release(self, request: httpx.Request, connection: http.client.HTTPConnection, reusable: bool) -> None:
        if reusable:
            with self.lock:
                self.idle[_origin(request)].append(connection)
        else:
            connection.close()

    def close(self) -> None:
        with self.lock:
            for connection in [connection for connections in self.idle.values() for connection in connections]:
                connection.close()
            self.idle.clear()


def _origin(request: httpx.Request) -> tuple[bytes, bytes, int | None]:
    return request.url.raw_scheme, request.url.raw_host, request.url.port


def _was_closed(connection: http.client.HTTPConnection) -> bool:
    """Return True if the server closed an idle connection; only then is there something to read."""
    if connection.sock is None:
        return True
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _send(connection: http.client.HTTPConnection, request: httpx.Request, waits: dict[str, Any]) -> http.client.HTTPResponse:
    unsent: OSError | None = None
    connection.sock.settimeout(waits.get("write", DEFAULT_TIMEOUT))
    try:
        connection.putrequest(request.method, request.url.raw_path.decode("ascii"), skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.raw:
            connection.putheader(name.decode("ascii"), value)
        connection.endheaders(request.read() or None)
    except TimeoutError as error:
        raise httpx.WriteTimeout(str(error)) from error
    except OSError as error:
        # A server that rejects a large body responds before it has read it, and closes. The response explains the error.
        unsent = error
    connection.sock.settimeout(waits.get("read", DEFAULT_TIMEOUT))
    try:
        return connection.getresponse()
    except TimeoutError as error:
        raise httpx.ReadTimeout(str(error)) from error
    except OSError as error:
        raise (httpx.WriteError(str(unsent)) if unsent else httpx.ReadError(str(error))) from error
    except http.client.HTTPException as error:
        raise httpx.RemoteProtocolError(str(error)) from error


class _Body(httpx.SyncByteStream):
    """The body of a response, read in one step if its length is known."""

    def __init__(self, response: http.client.HTTPResponse, release: Any) -> None:
        self.response, self.release = response, release
        self.complete = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            if self.response.length is not None:
                yield self.response.read()
            else:
                while piece := self.response.read1(PIECE):
                    yield piece
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error)) from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        except http.client.HTTPException as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        self.complete = True

    def close(self) -> None:
        if self.release is not None:
            release, self.release = self.release, None
            release(self.complete and not self.response.will_close)


def send_directly() -> bool:
    """Make new Flower clients in this process use ``DirectTransport``. Return False if that is not possible.

    With a proxy in the environment, Flower keeps httpx, which supports proxies.
    """
    try:
        from flwr.supercore.protobuf.client import ProtobufClient
    except ImportError:
        log.info("This Flower release has no ProtobufClient, so its requests are not optimised.")
        return False
    if _proxies():
        return False
    if hasattr(ProtobufClient.__init__, "__wrapped__"):
        return True
    before = ProtobufClient.__init__

    @functools.wraps(before)
    def init(self: Any, base_url: str, *, verify: ssl.SSLContext | bool | str = True, **others: Any) -> None:
        before(self, base_url, verify=verify, **others)
        self._client.close()
        self._client = _direct_client(_context(verify), self._client.timeout)

    ProtobufClient.__init__ = init
    return True


def send_over_grid_directly(grid: Any) -> bool:
    """Make the Grid of a ServerApp, which already has a client, use ``DirectTransport``."""
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
